"""Whatever the bytes, the codec refuses or gives a well-formed event; whatever the event, it comes back as it was."""

from __future__ import annotations

import io
import tracemalloc
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.codec import decode, encode, schema_for
from rollwire.schemas.errors import Refused
from rollwire.schemas.framing import MARKER, PREFIX_BYTES
from rollwire.schemas.golden import Example, all_examples, load_examples
from rollwire.schemas.ids import new_group_id
from rollwire.schemas.limits import MAX_ITEMS, SCAN_ABOVE, Malformed, compile_scan
from rollwire.schemas.reasons import REASONS
from rollwire.schemas.records import (
    Component,
    DeadLetter,
    Event,
    Header,
    Position,
    Reward,
    Rollout,
    RoutingTrace,
    Segment,
    Span,
)
from rollwire.schemas.routes import id_bits, pack

EXAMPLES = all_examples()
examples = st.sampled_from(EXAMPLES)
times = st.integers(946_684_800_000_000, 4_102_444_799_999_999)
long = st.integers(-(2**63), 2**63 - 1)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,20}", fullmatch=True)
finite = st.floats(allow_nan=False, allow_infinity=False)
groups = st.builds(new_group_id, times, st.integers(0, 2**74 - 1))


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    kinds = draw(st.lists(st.sampled_from(["prompt", "sampled", "tool", "summary", "unknown"]), max_size=6))
    kinds.insert(draw(st.integers(0, len(kinds))), "sampled")
    segments, mask, at = [], b"", 0
    for kind in kinds:
        size = draw(st.integers(1, 6))
        segments.append(Segment(kind=kind, start=at, end=at + size))  # type: ignore[arg-type]
        bits = st.lists(st.sampled_from([0, 1]), min_size=size, max_size=size)
        mask += bytes(draw(bits)) if kind == "sampled" else bytes(size)
        at += size
    sampled = sum(s.end - s.start for s in segments if s.kind == "sampled")
    cuts = sorted(draw(st.sets(st.integers(1, sampled), max_size=4)) | {sampled})
    versions = sorted(draw(st.lists(st.integers(0, 2**40), min_size=len(cuts), max_size=len(cuts))))
    starts = [0, *cuts[:-1]]
    dtype = draw(st.sampled_from(["u1", "u2", "u4"]))
    size = draw(st.integers(1, 64))
    group, index = draw(groups), draw(st.integers(0, size - 1))
    logprobs = st.floats(width=32, allow_nan=False, allow_infinity=False)
    return Rollout(
        rollout_id=f"{group}.{index}",
        group_id=group,
        index=index,
        group_size=size,
        model=draw(names),
        lineage=draw(names),
        environment=draw(names),
        task_id=draw(names),
        task=draw(text),
        token_ids=draw(st.binary(min_size=at * int(dtype[1]), max_size=at * int(dtype[1]))),
        token_dtype=dtype,
        segments=tuple(segments),
        loss_mask=mask,
        logprobs=np.array(draw(st.lists(logprobs, min_size=sampled, max_size=sampled)), "<f4").tobytes(),
        spans=tuple(Span(version=v, start=a, end=b) for v, a, b in zip(versions, starts, cuts, strict=True)),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort", "unknown"])),
        temperature=draw(st.floats(min_value=1e-6, max_value=1e3)),
        top_k_experts=draw(st.integers(0, 64)),
        fleet=draw(names),
        replica=draw(names),
        seed=draw(long),
        started_us=draw(times),
        finished_us=draw(times),
    )


@st.composite
def rewards(draw: st.DrawFn) -> Reward:
    group = draw(groups)
    parts = draw(st.dictionaries(text, finite, max_size=5))
    return Reward(
        rollout_id=f"{group}.{draw(st.integers(0, 999_999))}",
        group_id=group,
        reward=draw(st.none() | finite),
        components=tuple(Component(name=n, value=v) for n, v in parts.items()),
        outcome=draw(text),
        source=draw(st.sampled_from(["verifier", "judge", "user", "unknown"])),
        verifier=draw(names),
        verifier_version=draw(names),
        evidence=tuple(draw(st.lists(text, max_size=3))),
        scored_us=draw(times),
    )


@st.composite
def traces(draw: st.DrawFn) -> RoutingTrace:
    group = draw(groups)
    experts, rows = draw(st.integers(1, 256)), draw(st.integers(1, 8))
    top_k = draw(st.integers(1, min(experts, 8)))
    layers = tuple(sorted(draw(st.sets(st.integers(0, 2**31), min_size=1, max_size=4))))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ids_NK = np.stack([rng.permutation(experts)[:top_k] for _ in range(rows * len(layers))])
    encoding = draw(st.sampled_from(["u1", "bits", "bits+zstd"]))
    data = ids_NK.astype("u1").tobytes()
    if encoding != "u1":
        ids_NK[rng.random(len(ids_NK)) < 0.2] = experts  # not recorded
        data = pack(ids_NK.reshape(-1), id_bits(experts))
    if encoding == "bits+zstd":
        data = zstandard.compress(data)
    start, missing = draw(st.integers(0, 2**40)), draw(st.booleans())
    return RoutingTrace(
        rollout_id=f"{group}.0",
        group_id=group,
        layers=layers,
        num_experts=experts,
        top_k=top_k,
        start_row=start,
        rows=rows,
        tokens=start + rows + missing,
        last_row="missing" if missing else "recorded",
        encoding=encoding,
        data=data,
        claim=None,
        recorded_us=draw(times),
    )


@st.composite
def dead_letters(draw: st.DrawFn) -> DeadLetter:
    raw = st.none() | st.binary(max_size=64)
    return DeadLetter(
        source=Position(
            topic=draw(names), partition=draw(st.integers(0, 9)), offset=draw(st.integers(0, 2**62))
        ),
        key=draw(raw),
        value=draw(raw),
        headers=tuple(Header(key=draw(text), value=draw(raw)) for _ in range(draw(st.integers(0, 3)))),
        source_timestamp_us=draw(long),
        reason=draw(st.sampled_from(REASONS)),
        detail=draw(text),
        refused_by=draw(names),
        refused_us=draw(times),
    )


@given(event=rollouts() | rewards() | traces() | dead_letters(), time_us=times)
def test_any_valid_event_comes_back_as_it_was(event: Event, time_us: int) -> None:
    encoded = encode(event, source="test", time_us=time_us)
    again = decode(encoded.topic, encoded.value, encoded.headers, encoded.key)
    assert again == event
    assert encode(again, source="test", time_us=time_us) == encoded
    # The scan, which builds nothing, walks the same bytes to the same end.
    assert schema_for(type(event)).scan(encoded.value, PREFIX_BYTES) == len(encoded.value)


def outcome(example: Example, value: bytes) -> Event | str:
    """The event, or the reason it was refused with."""
    try:
        return decode(example.topic, value, example.headers, example.key)
    except Refused as refused:
        return refused.reason


def decoded_or_refused(example: Example, value: bytes) -> None:
    """Either `Refused` with a known reason or an event that can be written; any other exception fails the test."""
    found = outcome(example, value)
    if isinstance(found, str):
        assert found in REASONS
    else:
        written = encode(
            found, source="t", time_us=10**15
        )  # under the current schema, whatever it came under
        again = decode(example.topic, written.value, written.headers, example.key)
        assert encode(again, source="t", time_us=10**15) == written


@pytest.mark.parametrize("example", EXAMPLES, ids=[f"{e.topic}-{e.name}" for e in EXAMPLES])
def test_any_damaged_byte_is_refused_or_another_valid_event(example: Example) -> None:
    for at in range(len(example.value)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(example.value)
            damaged[at] ^= flip
            decoded_or_refused(example, bytes(damaged))


@given(example=examples, data=st.data())
@settings(max_examples=300)
def test_any_damage_is_refused_or_another_valid_event(example: Example, data: st.DataObject) -> None:
    value = example.value
    start = data.draw(st.integers(PREFIX_BYTES, len(value)))
    end = data.draw(st.integers(start, len(value)))
    decoded_or_refused(example, value[:start] + data.draw(st.binary(max_size=40)) + value[end:])


@given(topic=st.sampled_from(sorted(TOPICS)), body=st.binary(max_size=300), framed=st.booleans())
def test_random_bytes_are_refused(topic: str, body: bytes, framed: bool) -> None:
    example = load_examples(topic)[0]
    decoded_or_refused(example, example.value[:PREFIX_BYTES] + body if framed else body)


def varint(number: int) -> bytes:
    zigzag = (number << 1) ^ (number >> 63)
    out = bytearray()
    while zigzag > 0x7F:
        out.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    return bytes([*out, zigzag])


def with_count(count: int, filler: bytes) -> tuple[Example, bytes]:
    """A routing trace that claims `count` layers, followed by filler."""
    example = load_examples("routing-traces")[1]
    trace: Any = example.event
    head = b"".join(varint(len(t)) + t.encode() for t in (trace.rollout_id, trace.group_id))
    assert example.value[PREFIX_BYTES:].startswith(head)
    return example, example.value[:PREFIX_BYTES] + head + varint(count) + filler


@pytest.mark.parametrize("count", [20_000_000, 2**62, -(2**62), -(2**63), 2**63 - 1])
def test_a_huge_count_in_a_short_body_builds_nothing(count: int) -> None:
    example, value = with_count(count, b"\x02" * 50)
    tracemalloc.start()
    try:
        with pytest.raises(Refused) as caught:
            decode(example.topic, value, example.headers, example.key)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert caught.value.reason in ("malformed", "limit_exceeded")


@pytest.mark.parametrize("count", [MAX_ITEMS + 1, 2_000_000])
def test_a_count_that_the_bytes_could_fill_is_refused_before_it_is_built(count: int) -> None:
    example, value = with_count(count, b"\x02" * count)
    tracemalloc.start()
    try:
        with pytest.raises(Refused) as caught:
            decode(example.topic, value, example.headers, example.key)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert caught.value.reason == "limit_exceeded"


def test_many_small_blocks_are_counted_together() -> None:
    blocks = b"".join(varint(-100) + varint(100) + b"\x02" * 100 for _ in range(MAX_ITEMS // 100 + 1))
    example, value = with_count(1, b"\x02" + blocks)
    with pytest.raises(Refused) as caught:
        decode(example.topic, value, example.headers, example.key)
    assert caught.value.reason == "limit_exceeded"


def test_bodies_that_are_not_scanned_cannot_hold_too_many_items() -> None:
    assert SCAN_ABOVE < MAX_ITEMS  # no item is empty (tested with the schemas), so items <= bytes


def test_the_scan_refuses_what_does_not_fit() -> None:
    scan = compile_scan(
        {
            "type": "record",
            "name": "R",
            "fields": [
                {"name": "n", "type": "long"},
                {"name": "u", "type": ["null", "double", "float", "boolean"]},
            ],
        }
    )
    assert scan(b"\x02\x00", 0) == 2
    assert scan(b"\x02\x02" + bytes(8), 0) == 10
    assert scan(b"\x02\x04" + bytes(4), 0) == 6
    assert scan(b"\x02\x06\x00", 0) == 3
    for bad in (b"", b"\x80", b"\x02", b"\x02\x08", b"\x02\x01", b"\x02\x02\x00", b"\xff" * 11):
        with pytest.raises(Malformed):
            scan(bad, 0)


def test_c56_a_self_referencing_schema_cannot_reach_the_decoder() -> None:
    """C56: five thousand levels of nesting as a value; no schema of ours can nest, so it is just an unknown one."""
    value = MARKER + bytes(8) + b"\x02" * 5_000 + b"\x00"
    for example in EXAMPLES:
        with pytest.raises(Refused) as caught:
            decode(example.topic, value, example.headers, example.key)
        assert caught.value.reason == "unknown_schema"


def test_c59_nothing_of_ours_is_read_by_the_wrong_schema() -> None:
    """C59: all bytes must be used and the fingerprint must be the topic's, whatever the body would say."""
    for example in EXAMPLES:
        for other in EXAMPLES:
            if other.topic == example.topic:
                continue
            body = io.BytesIO(other.value[:PREFIX_BYTES] + example.value[PREFIX_BYTES:]).getvalue()
            with pytest.raises(Refused):
                decode(example.topic, body, example.headers, example.key)


def test_c59_a_batch_with_one_bad_event_keeps_its_nine_good_ones() -> None:
    example = load_examples("rewards")[0]
    batch = [example.value] * 10
    batch[3] = example.value[:-1]
    outcomes = [outcome(example, value) for value in batch]
    assert outcomes == [example.event] * 3 + ["malformed"] + [example.event] * 6
