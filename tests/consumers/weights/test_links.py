"""Where skip links lead, what is written for one, and how links are folded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec
import pytest

from rollwire.consumers.weights.link_chain import compose_link, missing_skips, plan_chain
from rollwire.consumers.weights.links import SPANS, Links, gone_link, skips_due, write_link
from rollwire.consumers.weights.paths import plan_path
from rollwire.consumers.weights.reader import Loaded, load_path
from rollwire.consumers.weights.snapshot import SnapshotWriter
from rollwire.kernels.delta.encode import encode_delta
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import State
from rollwire.schemas.errors import DigestMismatch, ObjectConflict, ObjectMissing, StateMismatch, WeightError
from rollwire.schemas.records import Event, WeightLink, WeightVersion
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.seams.log import TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.store_memory import MemoryStore

MakeState = Callable[..., State]
Move = Callable[..., State]


def test_each_span_is_a_chain_of_shorter_ones_that_are_there() -> None:
    made = {pair for version in range(200) for pair in skips_due(version, 0)}
    spans = list(SPANS)
    for base, version in made:
        span = version - base
        shorter = spans[spans.index(span) - 1] if span > spans[0] else 1
        if shorter > 1:
            assert {(at, at + shorter) for at in range(base, version, shorter)} <= made
    assert skips_due(64, 0) == [(60, 64), (48, 64), (32, 64), (0, 64)]
    assert skips_due(12, 0) == [(8, 12)]
    assert skips_due(13, 0) == []
    assert skips_due(16, 8) == [(12, 16)]  # nothing leads to before the first version


@pytest.fixture
def written(make_state: MakeState, move: Move) -> tuple[MemoryStore, list[WeightVersion], WeightLink]:
    store = MemoryStore()
    writer = SnapshotWriter(
        store, model="m", lineage="L", shard_bytes=100, anchor_shard_bytes=1 << 30, threads=1, hf_config=None
    )
    states = [make_state()]
    held = [writer.write_first(0, 0, states[0], 10**15)]
    for version in (1, 2):
        states.append(move(states[-1], version))
        held.append(writer.write_next(held[-1], version, version, states[-1], 10**15, anchor=False))
    delta = encode_delta(states[0], states[2], shard_bytes=100)
    events = [h.event for h in held]
    link = write_link(
        store, events[0], events[2], delta.shards, delta.heads, coder="gap", published_us=10**15
    )
    return store, events, link


def test_a_link_goes_through_the_log_and_names_objects_that_are_there(
    written: tuple[MemoryStore, list[WeightVersion], WeightLink],
) -> None:
    store, events, link = written
    assert (link.kind, link.base_version, link.version) == ("skip", 0, 2)
    assert len(link.objects) > 1
    for entry in link.objects:
        assert len(store.get(entry.key, sha256=entry.sha256)) == entry.size
    log = MemoryLog({"weight-links": 1})
    writer = log.writer()
    word = gone_link(events[2], None, 10**15)
    writer.write([outgoing(event, source="test", time_us=10**15) for event in (link, word)])
    reader = log.reader()
    reader.assign({TopicPartition("weight-links", 0): 0})
    assert [decode_record(record) for record in reader.poll(10, 1.0)] == [link, word]


def test_no_link_between_lineages_or_from_a_version_to_itself(
    written: tuple[MemoryStore, list[WeightVersion], WeightLink],
) -> None:
    store, events, _ = written
    for base in (events[2], msgspec.structs.replace(events[0], lineage="M")):
        with pytest.raises(StateMismatch, match="no link leads"):
            write_link(store, base, events[2], [], [], coder="gap", published_us=10**15)


def test_an_object_of_another_content_is_no_link(
    written: tuple[MemoryStore, list[WeightVersion], WeightLink],
) -> None:
    store, events, link = written
    data = [store.get(entry.key) for entry in link.objects]
    store.delete(link.objects[0].key)
    store.create(link.objects[0].key, b"damaged by hand")
    with pytest.raises(ObjectConflict):
        write_link(store, events[0], events[2], data, [10] * len(data), coder="gap", published_us=10**15)


class Chain(NamedTuple):
    store: MemoryStore
    states: list[State]
    events: list[WeightVersion]


def chain_of(make_state: MakeState, move: Move, count: int, coder: Literal["gap", "context"]) -> Chain:
    store = MemoryStore()
    writer = SnapshotWriter(
        store,
        model="m",
        lineage="L",
        shard_bytes=400,
        anchor_shard_bytes=1 << 30,
        threads=1,
        hf_config=None,
        coder=coder,
    )
    states = [make_state()]
    held = [writer.write_first(0, 0, states[0], 10**15)]
    for version in range(1, count):
        # Every third version changes nothing.
        states.append(states[-1] if version % 3 == 0 else move(states[-1], version, 0.02))
        held.append(writer.write_next(held[-1], version, version, states[-1], 10**15, anchor=False))
    return Chain(store, states, [h.event for h in held])


def test_a_link_is_composed_of_the_deltas_and_links_on_its_way(make_state: MakeState, move: Move) -> None:
    """And is, byte for byte, the delta between the two states."""
    store, states, events = chain_of(make_state, move, 17, "gap")
    links: list[WeightLink] = []
    for version in range(17):
        for base, _ in skips_due(version, 0):
            made = compose_link(store, events, links, base, version, published_us=10**15, shard_bytes=1 << 20)
            direct = encode_delta(states[base], states[version], shard_bytes=1 << 20)
            assert [store.get(entry.key) for entry in made.objects] == list(direct.shards)
            assert [entry.head_bytes for entry in made.objects] == list(direct.heads)
            links.append(made)
    assert [(link.base_version, link.version) for link in links][-2:] == [(12, 16), (0, 16)]
    assert [str(step) for step in plan_chain(events, links, 0, 15)] == [
        "skip 0>4",
        "skip 4>8",
        "skip 8>12",
        "delta 12>13",
        "delta 13>14",
        "same 14>15",
    ]
    held = Loaded(states[1], StateDigest.of(states[1]))
    path = plan_path(events, links, 1, 16)
    assert load_path(store, path, held).digest.hex == events[16].state_digest


def test_missing_links_are_found_shortest_first(make_state: MakeState, move: Move) -> None:
    store, _, events = chain_of(make_state, move, 17, "gap")
    assert missing_skips(events, (), 3) == [(12, 16), (0, 16)]
    assert missing_skips(events, (), 100) == [(0, 4), (4, 8), (8, 12), (12, 16), (0, 16)]
    made = compose_link(store, events, (), 12, 16, published_us=10**15)
    known = [made, gone_link(events[8], 4, 10**15)]
    assert missing_skips(events, known, 100) == [(0, 4), (8, 12), (0, 16)]
    assert missing_skips([], (), 9) == []


def test_what_comes_back_is_a_link_without_objects(make_state: MakeState) -> None:
    store = MemoryStore()
    writer = SnapshotWriter(
        store, model="m", lineage="L", shard_bytes=400, anchor_shard_bytes=1 << 30, threads=1, hf_config=None
    )
    held = [writer.write_first(0, 0, make_state(), 10**15)]
    for version, state in ((1, make_state(1)), (2, make_state())):
        held.append(writer.write_next(held[-1], version, version, state, 10**15, anchor=False))
    link = compose_link(store, [h.event for h in held], (), 0, 2, published_us=10**15)
    assert link.objects == ()
    assert decode_record_of(link) == link


def decode_record_of(link: WeightLink) -> Event:
    log = MemoryLog({"weight-links": 1})
    log.writer().write([outgoing(link, source="test", time_us=10**15)])
    reader = log.reader()
    reader.assign({TopicPartition("weight-links", 0): 0})
    return decode_record(reader.poll(10, 1.0)[0])


def test_where_no_chain_leads_it_is_said(make_state: MakeState, move: Move) -> None:
    store, _, events = chain_of(make_state, move, 6, "context")
    with pytest.raises(WeightError, match="no chain of gap deltas leads from version 0 to version 4"):
        compose_link(store, events, (), 0, 4, published_us=10**15)
    store, _, events = chain_of(make_state, move, 6, "gap")
    for base, version in ((0, 9), (-1, 3)):
        with pytest.raises(WeightError, match="not both known"):
            compose_link(store, events, (), base, version, published_us=10**15)
    with pytest.raises(WeightError, match="no chain"):
        compose_link(store, events, [gone_link(events[2], 1, 10**15)], 0, 4, published_us=10**15)
    lying = [*events[:3], msgspec.structs.replace(events[3], state_digest="0" * 64), *events[4:]]
    with pytest.raises(DigestMismatch, match="published are"):
        compose_link(store, lying, (), 1, 3, published_us=10**15)
    store.delete(events[2].objects[0].key)
    with pytest.raises(ObjectMissing):
        compose_link(store, events, (), 0, 4, published_us=10**15)


def test_repeats_are_dropped_unless_the_way_was_gone_in_between(
    written: tuple[MemoryStore, list[WeightVersion], WeightLink],
) -> None:
    _, events, link = written
    gone = gone_link(events[2], 0, 10**15)
    links = Links("m")
    assert [links.add(event) for event in (link, link, gone, link, link)] == [True, False, True, True, False]
    assert links.of("L") == [link, gone, link]
    assert links.of("M") == links.of(None) == []
    assert not Links("other").add(link)
