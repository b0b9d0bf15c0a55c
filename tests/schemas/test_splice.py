"""A group that is spliced from its rollouts' values is the group that is encoded from its fields, byte for byte."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import numpy as np
import pytest
from fastavro import schemaless_writer
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.schemas import splice
from rollwire.schemas.codec import decode, encode, schema_for
from rollwire.schemas.errors import Refused
from rollwire.schemas.framing import PREFIX_BYTES
from rollwire.schemas.golden import load_examples
from rollwire.schemas.ids import new_group_id, rollout_id
from rollwire.schemas.limits import SCAN_ABOVE
from rollwire.schemas.records import (
    Cut,
    Group,
    Member,
    Position,
    ProductionRollout,
    Rollout,
    Segment,
    SharedRun,
    Span,
)
from rollwire.schemas.splice import encode_group

US = 1_767_225_600_000_000
SOURCE = "rollwire/test"

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,90}", fullmatch=True)
floats = st.floats(allow_nan=False, allow_infinity=False)
offsets = st.integers(0, 2**63 - 1)
positions = st.builds(
    Position, topic=st.just("routing-traces"), partition=st.integers(0, 4_000), offset=offsets
)


def a_rollout(group: str, index: int, size: int, *, tokens: int, seed: int, text: str, model: str) -> Rollout:
    rng = np.random.default_rng(seed)
    prompt = int(rng.integers(0, tokens))
    sampled = tokens - prompt
    cut = int(rng.integers(0, sampled))
    segments = [Segment(kind="sampled", start=prompt, end=tokens)]
    if prompt:
        segments.insert(0, Segment(kind="prompt", start=0, end=prompt))
    spans = [Span(version=seed, start=0, end=cut)] if cut else []
    spans.append(Span(version=seed + 1, start=cut, end=sampled))
    shared = (SharedRun(rollout_id=rollout_id(group, max(0, index - 1)), from_start=0, start=0, end=1),)
    return Rollout(
        rollout_id=rollout_id(group, index),
        group_id=group,
        index=index,
        group_size=size,
        model=model,
        lineage="0f8fad5b-d9cb-469f-a165-70867728950e",
        environment="countdown",
        task_id="task",
        task=text,
        token_ids=rng.integers(0, 2**32, tokens, dtype="<u4").tobytes(),
        token_dtype="u4",
        segments=tuple(segments),
        loss_mask=bytes(prompt) + rng.integers(0, 2, sampled, dtype=np.uint8).tobytes(),
        logprobs=rng.standard_normal(sampled).astype("<f4").tobytes(),
        spans=tuple(spans),
        finish_reason="length",
        temperature=0.7,
        top_k_experts=seed % 9,
        fleet="fleet",
        replica="replica-0",
        seed=-seed,
        started_us=US,
        finished_us=US + seed,
        shared=shared if index and prompt else (),
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    group = new_group_id(US, draw(st.integers(0, 2**74 - 1)))
    size = draw(st.integers(1, 200))
    indices = sorted(draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=6)))
    model = draw(names)
    members = tuple(
        Member(
            rollout=a_rollout(
                group,
                index,
                size,
                tokens=draw(st.integers(1, 40)),
                seed=draw(st.integers(0, 2**31)),
                text=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=90)),
                model=model,
            ),
            reward=draw(st.none() | floats),
            advantage=draw(st.none() | floats),
            trace=draw(st.none() | positions),
            signals=draw(st.integers(0, 2**31)),
        )
        for index in indices
    )
    return Group(
        group_id=group,
        model=model,
        lineage="0f8fad5b-d9cb-469f-a165-70867728950e",
        environment="countdown",
        task_id="task",
        group_size=size,
        baseline=draw(st.sampled_from(["mean", "leave_one_out"])),
        members=members,
        cut=Cut(
            inputs=tuple(draw(st.lists(positions, max_size=4))), clock_us=US + draw(st.integers(0, 10**12))
        ),
    )


def values_of(group: Group) -> list[bytes | None]:
    return [encode(member.rollout, source=SOURCE, time_us=US).value for member in group.members]


def a_group(members: int = 4, tokens: int = 30) -> Group:
    group = new_group_id(US, 7)
    return Group(
        group_id=group,
        model="policy",
        lineage="0f8fad5b-d9cb-469f-a165-70867728950e",
        environment="countdown",
        task_id="task",
        group_size=members,
        baseline="mean",
        members=tuple(
            Member(
                rollout=a_rollout(group, i, members, tokens=tokens, seed=i, text="", model="policy"),
                reward=1.0,
                advantage=0.5,
                trace=None,
            )
            for i in range(members)
        ),
        cut=Cut(inputs=(), clock_us=US),
    )


def test_the_schemas_of_today_can_be_spliced() -> None:
    assert splice._LAYOUT.fits
    assert splice._LAYOUT.versions == {"rollouts": {2}, "production-rollouts": {1}}


@settings(max_examples=60, deadline=None)
@given(groups())
def test_spliced_bytes_are_the_encoded_bytes(group: Group) -> None:
    spliced = encode_group(group, values_of(group), source=SOURCE, time_us=US)
    assert spliced == encode(group, source=SOURCE, time_us=US)
    plain: Any = msgspec.to_builtins(group, builtin_types=(bytes,))
    bare = io.BytesIO()
    schemaless_writer(bare, schema_for(Group).avro, plain)
    assert spliced.value[PREFIX_BYTES:] == bare.getvalue()
    assert decode(spliced.topic, spliced.value, spliced.headers, spliced.key) == group


@pytest.mark.parametrize("tokens", [200, 12_000])
def test_large_groups_are_spliced_and_scanned(tokens: int) -> None:
    group = a_group(16, tokens)
    spliced = encode_group(group, values_of(group), source=SOURCE, time_us=US)
    assert (len(spliced.value) > SCAN_ABOVE) == (tokens > 1_000)
    assert spliced == encode(group, source=SOURCE, time_us=US)


def test_a_member_without_a_value_is_encoded() -> None:
    group = a_group()
    values = values_of(group)
    values[2] = None
    assert encode_group(group, values, source=SOURCE, time_us=US) == encode(group, source=SOURCE, time_us=US)


def test_a_body_in_blocks_goes_in_as_it_came() -> None:
    """Avro lets a writer cut an array into blocks and say their size: other bytes, the same rollout."""
    group = a_group(2)
    values = values_of(group)
    plain = encode(group.members[0].rollout, source=SOURCE, time_us=US).value
    segment = group.members[0].rollout.segments
    one = b"".join(bytes([kind, s.start << 1, s.end << 1]) for kind, s in zip((0, 2), segment, strict=True))
    assert plain.count(b"\x04" + one + b"\x00") == 1
    # A block of -2 items of 6 bytes, instead of one of 2.
    values[0] = plain.replace(b"\x04" + one + b"\x00", b"\x03\x0c" + one + b"\x00")
    headers = encode(group.members[0].rollout, source=SOURCE, time_us=US).headers
    assert decode("rollouts", values[0], headers) == group.members[0].rollout
    spliced = encode_group(group, values, source=SOURCE, time_us=US)
    assert spliced.value != encode(group, source=SOURCE, time_us=US).value
    assert decode("groups", spliced.value, spliced.headers, spliced.key) == group


def test_a_body_of_an_older_schema_is_not_spliced_but_written_anew() -> None:
    """Of rollouts v1, whose body lacks fields that a group's rollout has: also where others of the group are of today."""
    old = {e.name: e for e in load_examples("rollouts") if e.version == 1}["two-versions"]
    assert isinstance(old.event, Rollout)
    second = msgspec.structs.replace(old.event, rollout_id=rollout_id(old.event.group_id, 1), index=1)
    group = msgspec.structs.replace(
        a_group(),
        **{name: getattr(second, name) for name in ("group_id", "environment", "task_id", "group_size")},
        members=tuple(
            Member(rollout=rollout, reward=1.0, advantage=0.5, trace=None) for rollout in (old.event, second)
        ),
    )
    values = [old.value, encode(second, source=SOURCE, time_us=US).value]
    spliced = encode_group(group, values, source=SOURCE, time_us=US)
    assert spliced == encode(group, source=SOURCE, time_us=US)
    assert decode(spliced.topic, spliced.value, spliced.headers, spliced.key) == group


def a_production_group(tokens: int = 30) -> tuple[Group, bytes]:
    """A group of live traffic, and the value of its one rollout."""
    (example,) = load_examples("production-rollouts")
    assert isinstance(example.event, ProductionRollout)
    plain = a_rollout(example.event.group_id, 0, 1, tokens=tokens, seed=8, text="", model="policy")
    sealed = {"sealed": example.event.sealed, "outcome": "tool_error", "tenant": "acme", "top_k_experts": 0}
    fields = msgspec.structs.asdict(plain) | sealed
    group = msgspec.structs.replace(
        a_group(1),
        group_id=plain.group_id,
        baseline="cohort",
        members=(Member(rollout=Rollout(**fields), reward=None, advantage=None, trace=None, signals=0),),
    )
    return group, encode(ProductionRollout(**fields), source=SOURCE, time_us=US).value


def test_a_production_rollouts_body_is_spliced() -> None:
    group, value = a_production_group(3_000)
    spliced = encode_group(group, [value], source=SOURCE, time_us=US)
    assert value[PREFIX_BYTES:] in spliced.value
    assert spliced == encode(group, source=SOURCE, time_us=US)
    assert decode(spliced.topic, spliced.value, spliced.headers, spliced.key) == group


def test_a_value_of_the_other_topic_of_rollouts_is_refused() -> None:
    group, value = a_production_group()
    plain = msgspec.structs.replace(group, baseline="mean")
    with pytest.raises(Refused) as caught:
        encode_group(plain, [value], source=SOURCE, time_us=US)
    assert caught.value.reason == "wrong_schema"


def test_a_production_group_has_no_advantages_before_its_cohort_is_known() -> None:
    group, value = a_production_group()
    early = msgspec.structs.replace(
        group, members=(msgspec.structs.replace(group.members[0], advantage=0.5),)
    )
    assert refused_by_both(early, [value]) == {"inconsistent"}


def test_a_value_of_another_rollout_is_refused() -> None:
    group = a_group()
    values = values_of(group)
    values[0], values[1] = values[1], values[0]
    with pytest.raises(Refused, match="another rollout"):
        encode_group(group, values, source=SOURCE, time_us=US)


def refused_by_both(group: Group, values: list[bytes | None]) -> set[str]:
    """The reasons of the two ways to encode a group."""
    with pytest.raises(Refused) as spliced:
        encode_group(group, values, source=SOURCE, time_us=US)
    with pytest.raises(Refused) as encoded:
        encode(group, source=SOURCE, time_us=US)
    return {spliced.value.reason, encoded.value.reason}


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        ({"reward": float("nan")}, "not_finite"),
        ({"advantage": float("inf")}, "not_finite"),
        ({"reward": 1}, "malformed"),
        ({"advantage": np.float64(1.0)}, "malformed"),
        ({"signals": -1}, "inconsistent"),
        ({"signals": 1.0}, "malformed"),
        ({"trace": Position(topic="rewards", partition=0, offset=0)}, "inconsistent"),
        ({"trace": Position(topic="routing-traces", partition=0, offset=-1)}, "inconsistent"),
        ({"trace": Position(topic="routing-traces", partition=0, offset=1.0)}, "malformed"),  # type: ignore[arg-type]
    ],
)
def test_what_the_members_add_is_checked(member: dict[str, Any], reason: str) -> None:
    group = a_group()
    first = msgspec.structs.replace(group.members[0], **member)
    bad = msgspec.structs.replace(group, members=(first, *group.members[1:]))
    assert refused_by_both(bad, values_of(group)) == {reason}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "other"}, "inconsistent"),
        ({"group_size": 3}, "inconsistent"),
        ({"group_size": "4"}, "malformed"),
        ({"baseline": "median"}, "inconsistent"),
        ({"members": ()}, "inconsistent"),
        ({"cut": Cut(inputs=(), clock_us=3)}, "time_invalid"),
        ({"cut": Cut(inputs=(), clock_us=3.5)}, "malformed"),  # type: ignore[arg-type]
    ],
)
def test_the_frame_of_the_group_is_checked(changes: dict[str, Any], reason: str) -> None:
    group = a_group()
    bad = msgspec.structs.replace(group, **changes)
    values = values_of(group)[: len(bad.members)]
    assert refused_by_both(bad, values) == {reason}


def test_members_out_of_order_are_refused() -> None:
    group = a_group()
    bad = msgspec.structs.replace(group, members=group.members[::-1])
    with pytest.raises(Refused, match="behind"):
        encode_group(bad, values_of(bad), source=SOURCE, time_us=US)


def test_a_group_that_is_too_large_is_refused() -> None:
    group = a_group(16, 120_000)
    with pytest.raises(Refused) as caught:
        encode_group(group, values_of(group), source=SOURCE, time_us=US)
    assert caught.value.reason == "too_large"
