"""Verification goes every way to a version, and finds damage on each."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from rollwire.consumers.weights.keys import manifest_key, sha256_hex
from rollwire.consumers.weights.manifest import decode_manifest
from rollwire.consumers.weights.paths import anchor_claim
from rollwire.consumers.weights.publisher import PublisherConfig, SnapshotPublisher
from rollwire.consumers.weights.verify import verify_version, verify_ways
from rollwire.kernels.tensors import State
from rollwire.schemas.errors import FormatUnknown, ObjectMissing, WeightError
from rollwire.schemas.records import Claim, WeightVersion
from rollwire.streams.seams.store_memory import MemoryStore

MakeState = Callable[..., State]
Move = Callable[..., State]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def events(store: MemoryStore, make_state: MakeState, move: Move) -> list[WeightVersion]:
    publisher = SnapshotPublisher(store, model="m", lineage="L", config=PublisherConfig(anchor_every=2))
    found, state = [], make_state()
    for version in range(4):
        found.append(publisher.submit(version, version, state).result(20))
        publisher.committed(version)
        state = move(state, version)
    publisher.close()
    return found


def test_every_way_is_gone(store: MemoryStore, events: list[WeightVersion]) -> None:
    back = (
        "anchor 2",
        "delta 2>1",
        "delta 1>0",
    )  # where deltas run backwards, the other way around is one as well
    assert [way.steps for way in verify_version(store, events, (), 0)] == [("anchor 0",), back]
    ways = verify_version(store, events, (), 2)
    assert [way.kind for way in ways] == ["anchor", "delta"]
    assert [way.steps for way in ways] == [("anchor 2",), ("anchor 0", "delta 0>1", "delta 1>2")]
    assert ways[1].bytes == events[0].full_bytes + events[1].stored_bytes + events[2].stored_bytes
    assert [way.steps for way in verify_version(store, events, (), 3)] == [("anchor 2", "delta 2>3")]


@pytest.mark.parametrize("full", [False, True])
def test_a_missing_object_is_found_on_either_way(
    store: MemoryStore, events: list[WeightVersion], full: bool
) -> None:
    claim = anchor_claim(events[2]) if full else events[2].manifest
    assert claim is not None
    store.delete(decode_manifest(store.get(claim.key)).objects[0].key)
    with pytest.raises(ObjectMissing, match="version 2 by"):
        verify_version(store, events, (), 2)
    wrong = {way.kind: way.error is not None for way in verify_ways(store, events, (), 2)}
    assert wrong == {"anchor": full, "delta": not full}  # the other one is still right


def test_a_manifest_of_a_newer_release_is_named_with_its_object_and_the_remedy(
    store: MemoryStore, events: list[WeightVersion]
) -> None:
    data = b'{"format":4,"whatever":[]}'
    claim = Claim(key=manifest_key("m", sha256_hex(data)), size=len(data), sha256=sha256_hex(data))
    store.create(claim.key, data)
    newer = [*events[:2], msgspec.structs.replace(events[2], anchor=claim)]
    wrong = {way.kind: way.error for way in verify_ways(store, newer, (), 2)}
    assert wrong["delta"] is None
    assert isinstance(wrong["anchor"], FormatUnknown)
    assert claim.key in str(wrong["anchor"])
    assert "version 2 by anchor 2" in str(wrong["anchor"])
    assert "upgrade rollwire" in str(wrong["anchor"])


def test_unknown_versions_are_named(store: MemoryStore, events: list[WeightVersion]) -> None:
    with pytest.raises(WeightError, match="version 9 is not known; known are 0 to 3"):
        verify_version(store, events, (), 9)
    with pytest.raises(WeightError, match="known are none"):
        verify_version(store, [], (), 0)
