"""What an event may not say about itself (C01, C02, C09, C17-C22): refused with its reason, never repaired."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard

from rollwire.schemas.codec import decode, encode
from rollwire.schemas.errors import Refused
from rollwire.schemas.golden import load_examples
from rollwire.schemas.records import (
    Claim,
    Component,
    Coverage,
    Event,
    Group,
    LagCount,
    PackedBatch,
    Position,
    Promotion,
    Rollout,
    RoutingTrace,
    Score,
    Segment,
    Span,
)
from rollwire.schemas.routes import decode_ids, pack
from rollwire.schemas.validate import validate

TIME_US = 1_767_225_603_000_000
NAN = math.nan


def event_of(topic: str, name: str) -> Any:
    return next(e.event for e in load_examples(topic) if e.name == name)


def f4(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def spans(*parts: tuple[int, int, int]) -> tuple[Span, ...]:
    return tuple(Span(version=v, start=a, end=b) for v, a, b in parts)


def segments(*parts: tuple[Any, int, int]) -> tuple[Segment, ...]:
    return tuple(Segment(kind=k, start=a, end=b) for k, a, b in parts)


def replaced(event: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(event, **changes)


def reason_of(event: Event) -> str:
    """Why an event is refused, on the way out; an event that another client wrote is refused alike on the way in."""
    with pytest.raises(Refused) as caught:
        encode(event, source="test", time_us=TIME_US)
    with pytest.raises(Refused) as direct:
        validate(event)
    assert direct.value.reason == caught.value.reason
    return caught.value.reason


ROLLOUT = event_of("rollouts", "two-versions")  # 5 prompt tokens, 4 sampled: 2 of version 3, 2 of version 4
SEALED = event_of("production-rollouts", "sealed")
COHORT = event_of("packed-batches", "with-a-cohort")  # one answer with signals, one tool error without
COHORT_STEP = event_of("train-steps", "with-a-cohort")
COVERED = Coverage(outcome="answered", rollouts=1, signalled=2)
TRACE = event_of("routing-traces", "inline")  # 3 layers, 8 experts, top 2, 2 rows
CLAIMED = event_of("routing-traces", "claim-check")
PACKED = event_of("routing-traces", "packed-bits")  # layers 1 and 3, 384 experts, top 3, 2 rows from row 6


def packed(row: list[int]) -> bytes:
    """The data of `PACKED` with another first row in layer 1."""
    return pack(np.array([*row, 7, 1, 255, 384, 384, 384, 300, 2, 9], np.uint16), 9)


OTHER_GROUP = event_of("rollouts", "tool-call").group_id
FRAME = zstandard.compress(PACKED.data)
SKIPPABLE = b"\x50\x2a\x4d\x18\x04\x00\x00\x00skip"  # RFC 8878, 3.1.2

Case = tuple[str, Event, dict[str, Any], str]

C01: list[Case] = [
    # one logprob a sampled token
    ("one short", ROLLOUT, {"logprobs": f4(-1, -1, -1)}, "logprob_length"),
    ("one too many", ROLLOUT, {"logprobs": f4(-1, -1, -1, -1, -1)}, "logprob_length"),
    ("not whole", ROLLOUT, {"logprobs": f4(-1, -1, -1, -1)[:-1]}, "logprob_length"),
    ("none", ROLLOUT, {"logprobs": b""}, "logprob_length"),
    ("not recorded", ROLLOUT, {"logprobs": f4(-1, NAN, -1, -1)}, "logprob_missing"),
    ("infinite", ROLLOUT, {"logprobs": f4(-1, -math.inf, -1, -1)}, "not_finite"),
    ("both infinities", ROLLOUT, {"logprobs": f4(-math.inf, math.inf, -1, -1)}, "not_finite"),
]

C02: list[Case] = [
    # spans tile the sampled tokens
    ("sum below", ROLLOUT, {"spans": spans((3, 0, 2), (4, 2, 3))}, "span_invalid"),
    ("sum above", ROLLOUT, {"spans": spans((3, 0, 2), (4, 2, 5))}, "span_invalid"),
    ("overlap", ROLLOUT, {"spans": spans((3, 0, 3), (4, 2, 4))}, "span_invalid"),
    ("hole", ROLLOUT, {"spans": spans((3, 0, 1), (4, 2, 4))}, "span_invalid"),
    ("unsorted", ROLLOUT, {"spans": spans((4, 2, 4), (3, 0, 2))}, "span_invalid"),
    ("falling version", ROLLOUT, {"spans": spans((4, 0, 2), (3, 2, 4))}, "span_invalid"),
    ("negative version", ROLLOUT, {"spans": spans((-1, 0, 4))}, "span_invalid"),
    ("empty span", ROLLOUT, {"spans": spans((3, 0, 0), (3, 0, 4))}, "span_invalid"),
    ("no spans", ROLLOUT, {"spans": ()}, "span_invalid"),
]

C09: list[Case] = [
    ("reward lost", event_of("rewards", "right"), {"reward": NAN}, "not_finite"),
    ("reward infinite", event_of("rewards", "right"), {"reward": math.inf}, "not_finite"),
    (
        "component lost",
        event_of("rewards", "right"),
        {"components": (Component(name="value", value=NAN),)},
        "not_finite",
    ),
]

FRAMES: list[Case] = [
    ("no frame", PACKED, {"encoding": "bits+zstd"}, "routing_invalid"),
    ("empty frame", PACKED, {"encoding": "bits+zstd", "data": zstandard.compress(b"")}, "array_length"),
    (
        "frame of another size",
        PACKED,
        {"encoding": "bits+zstd", "data": zstandard.compress(bytes(1 << 20))},
        "array_length",
    ),
    (
        "frame cut",
        PACKED,
        {"encoding": "bits+zstd", "data": zstandard.compress(PACKED.data)[:-1]},
        "routing_invalid",
    ),
    (
        "frame without its size",
        PACKED,
        {
            "encoding": "bits+zstd",
            "data": zstandard.ZstdCompressor(write_content_size=False).compress(PACKED.data),
        },
        "array_length",
    ),
    (
        "zeros without end",
        PACKED,
        {
            "encoding": "bits+zstd",
            "rows": 10_000_000,
            "tokens": 10_000_006,
            "data": zstandard.compress(bytes(60_000_000 + 7_500_000)),
        },
        "too_large",
    ),
    (
        "two frames, of which the first has the size",
        PACKED,
        {"encoding": "bits+zstd", "data": FRAME + FRAME},
        "routing_invalid",
    ),
    (
        "a frame and a skippable one",
        PACKED,
        {"encoding": "bits+zstd", "data": FRAME + SKIPPABLE},
        "routing_invalid",
    ),
    (
        "a frame and junk",
        PACKED,
        {"encoding": "bits+zstd", "data": FRAME + b"JUNK"},
        "routing_invalid",
    ),
]

CASES: list[Case] = [
    # segments and mask
    (
        "segments short",
        ROLLOUT,
        {"segments": segments(("prompt", 0, 5), ("sampled", 5, 8))},
        "segment_invalid",
    ),
    (
        "segments long",
        ROLLOUT,
        {"segments": segments(("prompt", 0, 5), ("sampled", 5, 10))},
        "segment_invalid",
    ),
    (
        "segments hole",
        ROLLOUT,
        {"segments": segments(("prompt", 0, 4), ("sampled", 5, 9))},
        "segment_invalid",
    ),
    ("no segments", ROLLOUT, {"segments": ()}, "segment_invalid"),
    ("mask on the prompt", ROLLOUT, {"loss_mask": bytes([0, 0, 0, 0, 1, 1, 1, 1, 1])}, "segment_invalid"),
    ("mask of twos", ROLLOUT, {"loss_mask": bytes([0, 0, 0, 0, 0, 2, 1, 1, 1])}, "segment_invalid"),
    (
        "nothing sampled",
        ROLLOUT,
        {"segments": segments(("prompt", 0, 9)), "loss_mask": bytes(9)},
        "sequence_empty",
    ),
    ("no tokens", ROLLOUT, {"token_ids": b"", "loss_mask": b""}, "sequence_empty"),
    ("a token short", ROLLOUT, {"token_ids": ROLLOUT.token_ids[:-1]}, "array_length"),
    ("a mask short", ROLLOUT, {"loss_mask": ROLLOUT.loss_mask[:-1]}, "array_length"),
    ("other dtype", ROLLOUT, {"token_dtype": "u2"}, "array_length"),
    ("unknown dtype", ROLLOUT, {"token_dtype": "i4"}, "array_length"),
    # ids and scalars
    ("other index", ROLLOUT, {"index": 1}, "id_invalid"),
    ("index beyond the group", ROLLOUT, {"group_size": 0}, "id_invalid"),
    ("other group", ROLLOUT, {"group_id": OTHER_GROUP}, "id_invalid"),
    ("no uuid", ROLLOUT, {"group_id": "g", "rollout_id": "g.0"}, "id_invalid"),
    ("no model", ROLLOUT, {"model": ""}, "id_invalid"),
    ("odd model", ROLLOUT, {"model": "a b"}, "id_invalid"),
    ("cold", ROLLOUT, {"temperature": 0.0}, "inconsistent"),
    ("temperature lost", ROLLOUT, {"temperature": NAN}, "not_finite"),
    ("seconds", ROLLOUT, {"started_us": 1_767_225_600}, "time_invalid"),
    ("milliseconds", ROLLOUT, {"finished_us": 1_767_225_600_000}, "time_invalid"),
    # rewards
    (
        "component twice",
        event_of("rewards", "right"),
        {"components": (Component(name="value", value=1.0),) * 2},
        "reward_invalid",
    ),
    ("reward of another group", event_of("rewards", "right"), {"group_id": OTHER_GROUP}, "id_invalid"),
    ("no verifier", event_of("rewards", "right"), {"verifier": ""}, "id_invalid"),
    # routing traces (C17, C18, C22)
    ("rows short", TRACE, {"data": TRACE.data[:-1]}, "array_length"),
    ("a row more", TRACE, {"rows": 3}, "array_length"),
    ("id beyond", TRACE, {"data": bytes([0, 8, *TRACE.data[2:]])}, "routing_invalid"),
    ("expert twice", TRACE, {"data": bytes([1, 1, *TRACE.data[2:]])}, "routing_invalid"),
    ("boundary row of zeros", TRACE, {"data": TRACE.data[:6] + bytes(6)}, "routing_invalid"),
    (
        "expert twice of three",
        TRACE,
        {"top_k": 3, "layers": (0, 1), "data": bytes([0, 1, 0] * 4)},
        "routing_invalid",
    ),
    ("layers fall", TRACE, {"layers": (0, 2, 1)}, "routing_invalid"),
    ("layer twice", TRACE, {"layers": (0, 1, 1)}, "routing_invalid"),
    ("no layers", TRACE, {"layers": ()}, "routing_invalid"),
    ("too many experts", TRACE, {"num_experts": 257}, "routing_invalid"),
    ("top above experts", TRACE, {"num_experts": 1}, "routing_invalid"),
    ("no rows", TRACE, {"rows": 0, "data": b""}, "routing_invalid"),
    ("negative start", TRACE, {"start_row": -1}, "routing_invalid"),
    ("odd encoding", TRACE, {"encoding": "u2"}, "routing_invalid"),
    ("neither data nor claim", TRACE, {"data": None}, "routing_invalid"),
    ("data and claim", TRACE, {"claim": CLAIMED.claim}, "routing_invalid"),
    ("empty claim", CLAIMED, {"claim": Claim(key="k", size=0, sha256="0" * 64)}, "inconsistent"),
    ("claim without digest", CLAIMED, {"claim": Claim(key="k", size=1, sha256="")}, "id_invalid"),
    ("row of the last token missing", TRACE, {"tokens": 2}, "routing_invalid"),
    ("a row beyond the tokens", TRACE, {"tokens": 1, "last_row": "recorded"}, "routing_invalid"),
    ("two rows short", TRACE, {"tokens": 4}, "routing_invalid"),
    ("last row or not", TRACE, {"last_row": "unknown"}, "routing_invalid"),
    ("rows at the front are missing", TRACE, {"start_row": 1}, "routing_invalid"),
    ("expert 384 of 384", PACKED, {"data": packed([0, 384, 1])}, "routing_invalid"),
    ("expert 385 of 384", PACKED, {"data": packed([0, 385, 1])}, "routing_invalid"),
    ("expert -1", PACKED, {"data": packed([0, 511, 1])}, "routing_invalid"),
    ("expert twice, packed", PACKED, {"data": packed([256, 0, 256])}, "routing_invalid"),
    ("bits beyond the last", PACKED, {"data": PACKED.data[:-1] + b"\xf3"}, "routing_invalid"),
    ("packed short", PACKED, {"data": PACKED.data[:-1]}, "array_length"),
    ("too many experts, packed", PACKED, {"num_experts": 65_536}, "routing_invalid"),
    ("claim of another size", CLAIMED, {"num_experts": 256, "encoding": "bits"}, "array_length"),
    (
        "above the claim check",
        TRACE,
        {"layers": (0,), "rows": 300_000, "data": bytes([0, 1] * 300_000)},
        "too_large",
    ),
    # fates and closings
    ("unknown reason", event_of("group-fates", "trained"), {"reason": "bored"}, "inconsistent"),
    ("dropped and trained", event_of("group-fates", "trained"), {"fate": "dropped"}, "inconsistent"),
    (
        "member twice",
        event_of("group-fates", "trained"),
        {"members": (ROLLOUT.rollout_id,) * 2},
        "inconsistent",
    ),
    ("foreign member", event_of("group-fates", "trained"), {"members": (f"{OTHER_GROUP}.0",)}, "id_invalid"),
    ("closed without reason", event_of("groups-closed", "filtered"), {"reason": ""}, "inconsistent"),
    # steps, versions, status
    ("version jumps", event_of("train-steps", "step"), {"version": 6}, "inconsistent"),
    ("step 0", event_of("train-steps", "step"), {"step": 0}, "inconsistent"),
    ("lags lost", event_of("train-steps", "step"), {"lag_histogram": ()}, "inconsistent"),
    (
        "lags unsorted",
        event_of("train-steps", "step"),
        {"lag_histogram": (LagCount(lag=1, tokens=2), LagCount(lag=0, tokens=6))},
        "inconsistent",
    ),
    ("no share", event_of("train-steps", "step"), {"ratio_truncated": 1.5}, "inconsistent"),
    ("rate lost", event_of("train-steps", "step"), {"learning_rate": NAN}, "not_finite"),
    ("no digest", event_of("train-steps", "step"), {"state_digest": "xyz"}, "id_invalid"),
    ("masked more than trained", event_of("train-steps", "step"), {"masked_low": 9}, "inconsistent"),
    ("mask below nothing", event_of("train-steps", "step"), {"masked_high": -1}, "inconsistent"),
    ("sequences rejected", event_of("train-steps", "step"), {"rejected_sequences": 3}, "inconsistent"),
    (
        "mismatch of a part",
        event_of("train-steps", "step"),
        {"mismatch_by": event_of("train-steps", "step").mismatch_by[:1]},
        "inconsistent",
    ),
    (
        "mismatch named twice",
        event_of("train-steps", "step"),
        {
            "mismatch_by": (
                msgspec.structs.replace(event_of("train-steps", "step").mismatch_by[0], tokens=4),
            )
            * 2
            + event_of("train-steps", "step").mismatch_by[1:]
        },
        "inconsistent",
    ),
    ("anchor on a base", event_of("weight-versions", "anchor"), {"base_version": 0}, "inconsistent"),
    ("delta without base", event_of("weight-versions", "delta"), {"base_version": None}, "inconsistent"),
    ("base above", event_of("weight-versions", "delta"), {"base_version": 5}, "inconsistent"),
    ("empty that changes", event_of("weight-versions", "delta"), {"kind": "empty"}, "inconsistent"),
    ("more than all", event_of("weight-versions", "delta"), {"changed_elements": 340_001}, "inconsistent"),
    ("revert to nothing", event_of("weight-versions", "revert"), {"reverts_to": None}, "inconsistent"),
    ("revert of nothing", event_of("weight-versions", "revert"), {"reverts_to": 5}, "inconsistent"),
    ("no revert that reverts", event_of("weight-versions", "delta"), {"reverts_to": 2}, "inconsistent"),
    ("revert later", event_of("packed-batches", "after-a-revert"), {"newest_revert": 5}, "inconsistent"),
    (
        "revert to no version",
        event_of("packed-batches", "after-a-revert"),
        {"newest_revert": 0},
        "inconsistent",
    ),
    ("live traffic in plain", SEALED, {"sealed": None}, "seal_invalid"),
    ("sealed with its task", SEALED, {"task": "{}"}, "seal_invalid"),
    ("sealed bytes of another dtype", SEALED, {"token_dtype": "u2"}, "array_length"),
    ("sealed bytes said to be u1", SEALED, {"token_dtype": "u1", "token_ids": bytes(9)}, "seal_invalid"),
    ("a pair of live traffic", SEALED, {"group_size": 2}, "inconsistent"),
    ("live traffic with a trace", SEALED, {"top_k_experts": 2}, "routing_invalid"),
    ("odd outcome", SEALED, {"outcome": "tool error!"}, "id_invalid"),
    ("odd tenant", SEALED, {"tenant": "a\nb"}, "id_invalid"),
    ("no pseudonym", SEALED, {"sealed": replaced(SEALED.sealed, subject="ada@example.org")}, "seal_invalid"),
    ("short nonce", SEALED, {"sealed": replaced(SEALED.sealed, nonce=bytes(11))}, "seal_invalid"),
    ("short tag", SEALED, {"sealed": replaced(SEALED.sealed, tag=bytes(12))}, "seal_invalid"),
    ("negative generation", SEALED, {"sealed": replaced(SEALED.sealed, key=-1)}, "seal_invalid"),
    ("sealed rollout with a task", ROLLOUT, {"sealed": SEALED.sealed}, "seal_invalid"),
    ("coverage twice", COHORT, {"coverage": COHORT.coverage[:1] * 2}, "inconsistent"),
    ("coverage of others", COHORT, {"cohort_size": 3}, "inconsistent"),
    ("more signals than rollouts", COHORT, {"coverage": (COVERED,), "cohort_size": 1}, "inconsistent"),
    ("mean of a cohort", COHORT, {"cohort_mean": NAN}, "not_finite"),
    ("negative age", COHORT, {"max_age_ms": -1}, "inconsistent"),
    ("more erased than there are", COHORT_STEP, {"erased_sequences": 2}, "inconsistent"),
    ("more of production than in all", COHORT_STEP, {"production_sequences": 99}, "inconsistent"),
    ("link without base", event_of("weight-links", "skip"), {"base_version": None}, "inconsistent"),
    ("link to itself", event_of("weight-links", "skip"), {"base_version": 4}, "inconsistent"),
    ("skip backwards", event_of("weight-links", "skip"), {"base_version": 9}, "inconsistent"),
    ("inverse forwards", event_of("weight-links", "inverse"), {"base_version": 2}, "inconsistent"),
    ("link of another size", event_of("weight-links", "skip"), {"stored_bytes": 1}, "inconsistent"),
    ("link without a digest", event_of("weight-links", "skip"), {"base_digest": ""}, "id_invalid"),
    ("gone with bytes", event_of("weight-links", "gone"), {"stored_bytes": 1}, "inconsistent"),
    ("serves without digest", event_of("fleet-status", "swapped"), {"state_digest": ""}, "id_invalid"),
    ("negative pause", event_of("fleet-status", "swapped"), {"pause_ms": -1.0}, "inconsistent"),
    ("negative bytes", event_of("fleet-status", "swapped"), {"fetched_bytes": -1}, "inconsistent"),
    ("no suite", event_of("evaluations", "held-out"), {"suite": ""}, "id_invalid"),
    ("no version", event_of("evaluations", "held-out"), {"version": -1}, "inconsistent"),
    ("promotion with a suite", event_of("evaluations", "promoted"), {"suite": "s"}, "inconsistent"),
    ("promotion with tasks", event_of("evaluations", "promoted"), {"tasks": 1}, "inconsistent"),
    ("promotion below none", event_of("evaluations", "promoted"), {"version": -2}, "inconsistent"),
    (
        "promotion onto nothing",
        event_of("evaluations", "promoted"),
        {"promotion": Promotion(channel="", by="a", reason="")},
        "id_invalid",
    ),
    (
        "score lost",
        event_of("evaluations", "held-out"),
        {"scores": (Score(name="a", value=NAN),)},
        "not_finite",
    ),
    (
        "score twice",
        event_of("evaluations", "held-out"),
        {"scores": (Score(name="a", value=1.0),) * 2},
        "inconsistent",
    ),
    ("refused for nothing", event_of("dead-letters", "short-logprobs"), {"reason": ""}, "inconsistent"),
]


@pytest.mark.parametrize(("event", "changes", "reason"), [c[1:] for c in C01], ids=[c[0] for c in C01])
def test_c01_logprobs_are_neither_padded_nor_cut(event: Event, changes: dict[str, Any], reason: str) -> None:
    validate(event)
    assert reason_of(msgspec.structs.replace(event, **changes)) == reason


@pytest.mark.parametrize(("event", "changes", "reason"), [c[1:] for c in C02], ids=[c[0] for c in C02])
def test_c02_spans_tile_the_sampled_tokens_in_order(
    event: Event, changes: dict[str, Any], reason: str
) -> None:
    validate(event)
    assert reason_of(msgspec.structs.replace(event, **changes)) == reason


@pytest.mark.parametrize(("event", "changes", "reason"), [c[1:] for c in C09], ids=[c[0] for c in C09])
def test_c09_a_reward_is_finite_or_null(event: Event, changes: dict[str, Any], reason: str) -> None:
    validate(event)
    assert reason_of(msgspec.structs.replace(event, **changes)) == reason


@pytest.mark.parametrize(("event", "changes", "reason"), [c[1:] for c in FRAMES], ids=[c[0] for c in FRAMES])
def test_c79_c82_a_frame_of_routes_is_one_whole_frame_of_the_stated_size(
    event: Event, changes: dict[str, Any], reason: str
) -> None:
    validate(event)
    assert reason_of(msgspec.structs.replace(event, **changes)) == reason


@pytest.mark.parametrize(("event", "changes", "reason"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_an_event_that_contradicts_itself_is_refused(
    event: Event, changes: dict[str, Any], reason: str
) -> None:
    validate(event)
    assert reason_of(msgspec.structs.replace(event, **changes)) == reason


GROUP: Group = event_of("groups", "pair")


def members(*changes: dict[str, Any]) -> Group:
    pairs = zip(GROUP.members, changes, strict=True)
    return msgspec.structs.replace(GROUP, members=tuple(msgspec.structs.replace(m, **c) for m, c in pairs))


# Logprobs of a rollout of one sampled token or of 2,000 (more than are looked at together), some of which are wrong.
@pytest.mark.parametrize("tokens", [1, 2_000])
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({0: [NAN]}, "logprob_missing"),
        ({2: [math.inf]}, "not_finite"),
        ({1: [NAN], 2: [math.inf]}, "logprob_missing"),
        ({1: [-math.inf], 2: [NAN]}, "not_finite"),
        (
            {1: b"\x00\x00\x80", 2: b"\x7f\x00\x00\x00\x00"},
            "logprob_length",
        ),  # 8 bytes, an infinity across them
        ({0: [NAN], 1: b"\x00"}, "logprob_missing"),
        ({0: b"\x00", 1: [NAN]}, "logprob_length"),
        ({0: [-1.0, -1.0], 1: []}, "logprob_length"),
    ],
)
def test_c01_logprobs_of_a_group_are_looked_at_one_by_one_and_in_order(
    tokens: int, wrong: dict[int, bytes | list[float]], reason: str
) -> None:
    def member(index: int, logprobs: bytes) -> Any:
        rollout = msgspec.structs.replace(
            GROUP.members[0].rollout,
            rollout_id=f"{GROUP.group_id}.{index}",
            index=index,
            group_size=3,
            token_ids=bytes(1 + tokens),
            token_dtype="u1",
            segments=segments(("prompt", 0, 1), ("sampled", 1, 1 + tokens)),
            loss_mask=b"\x00" + b"\x01" * tokens,
            logprobs=logprobs,
            spans=spans((3, 0, tokens)),
        )
        return msgspec.structs.replace(GROUP.members[0], rollout=rollout)

    right = f4(*[-1.0] * tokens)
    rest = f4(*[-1.0] * (tokens - 1))
    logprobs = [right] * 3
    validate(msgspec.structs.replace(GROUP, group_size=3, members=tuple(map(member, range(3), logprobs))))
    for index, end in wrong.items():
        logprobs[index] = rest + (end if isinstance(end, bytes) else f4(*end))
    group = msgspec.structs.replace(GROUP, group_size=3, members=tuple(map(member, range(3), logprobs)))
    assert reason_of(group) == reason


def test_a_group_agrees_with_its_members() -> None:
    first, second = GROUP.members
    other = msgspec.structs.replace(second.rollout, task_id="another")
    assert reason_of(members({}, {"rollout": other})) == "inconsistent"
    broken = msgspec.structs.replace(second.rollout, logprobs=b"")
    assert reason_of(members({}, {"rollout": broken})) == "logprob_length"
    assert reason_of(members({}, {"advantage": NAN})) == "not_finite"
    assert reason_of(members({}, {"reward": math.inf})) == "not_finite"
    position = Position(topic="rollouts", partition=0, offset=0)
    assert reason_of(members({}, {"trace": position})) == "inconsistent"
    assert reason_of(msgspec.structs.replace(GROUP, members=(second, first))) == "inconsistent"
    assert reason_of(msgspec.structs.replace(GROUP, members=(first, first))) == "inconsistent"
    assert reason_of(msgspec.structs.replace(GROUP, members=())) == "inconsistent"
    assert reason_of(msgspec.structs.replace(GROUP, baseline="median")) == "inconsistent"
    assert (
        reason_of(msgspec.structs.replace(GROUP, cut=msgspec.structs.replace(GROUP.cut, clock_us=1)))
        == "time_invalid"
    )


PLAN: PackedBatch = event_of("packed-batches", "one-rank")


def i4(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def i8(*values: int) -> bytes:
    return np.array(values, "<i8").tobytes()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cu_seqlens": i4(0, 9, 17)}, "array_length"),
        ({"cu_seqlens": i4(1, 9, 18)}, "array_length"),
        ({"cu_seqlens": i4(0, 18)}, "array_length"),
        ({"cu_seqlens": i4(0, 18, 9)}, "array_length"),
        ({"cu_seqlens": i4(0, 9, 9)}, "array_length"),
        ({"cu_seqlens": b""}, "array_length"),
        ({"token_ids": b""}, "array_length"),
        ({"loss_mask": bytes(17)}, "array_length"),
        ({"loss_mask": b"\x02" * 18}, "segment_invalid"),
        ({"loss_mask": bytes(18)}, "logprob_length"),
        ({"logprobs": f4(*[-1.0] * 7)}, "logprob_length"),
        ({"logprobs": f4(*[-1.0] * 7, NAN)}, "logprob_missing"),
        ({"versions": i8(*[4] * 7)}, "array_length"),
        ({"versions": i8(*[4] * 7, 5)}, "inconsistent"),
        ({"versions": i8(*[4] * 7, 2)}, "inconsistent"),
        ({"advantages": f4(0.5)}, "array_length"),
        ({"advantages": f4(0.5, math.inf)}, "not_finite"),
        ({"traces": (None,)}, "array_length"),
        ({"environments": ("countdown",)}, "array_length"),
        ({"fleets": ("fleet",) * 3}, "array_length"),
        ({"seals": (None,)}, "array_length"),
        ({"seals": (None, replaced(SEALED.sealed, tag=b""))}, "seal_invalid"),
        ({"rollout_ids": ()}, "array_length"),
        ({"rollout_ids": ("a", "b")}, "id_invalid"),
        ({"rollout_ids": (ROLLOUT.rollout_id,) * 2}, "inconsistent"),
    ],
)
def test_the_arrays_of_a_microbatch_agree(changes: dict[str, Any], reason: str) -> None:
    microbatch = msgspec.structs.replace(PLAN.microbatches[0], **changes)
    assert reason_of(msgspec.structs.replace(PLAN, microbatches=(microbatch,))) == reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_budget": 17}, "over_budget"),
        ({"rank": 1}, "inconsistent"),
        ({"rank": -1}, "inconsistent"),
        ({"step": 0}, "inconsistent"),
        ({"max_lag_versions": 0}, "stale"),
        ({"oldest_version": 5}, "version_future"),
        ({"total_sequences": 1}, "inconsistent"),
        ({"total_tokens": 17}, "inconsistent"),
        ({"group_ids": (GROUP.group_id,) * 2}, "inconsistent"),
        ({"group_ids": ("g",)}, "id_invalid"),
        ({"plan_digest": ""}, "id_invalid"),
        ({"reward_mean": NAN}, "not_finite"),
    ],
)
def test_a_plan_agrees_with_itself(changes: dict[str, Any], reason: str) -> None:
    assert reason_of(msgspec.structs.replace(PLAN, **changes)) == reason


def test_a_budget_that_is_just_met_and_a_rank_without_work_are_fine() -> None:
    validate(msgspec.structs.replace(PLAN, token_budget=18))
    validate(msgspec.structs.replace(PLAN, microbatches=()))


def test_all_256_experts_fit_one_byte() -> None:
    rows = np.arange(256, dtype=np.uint8).reshape(-1, 2)
    trace: RoutingTrace = msgspec.structs.replace(
        TRACE, num_experts=256, layers=(0,), rows=128, tokens=129, data=rows.tobytes()
    )
    encoded = encode(trace, source="test", time_us=TIME_US)
    assert decode(encoded.topic, encoded.value, encoded.headers, encoded.key) == trace


def test_c22_ids_of_384_experts_keep_their_value_and_order() -> None:
    shape = (PACKED.rows, len(PACKED.layers), PACKED.top_k)
    ids = decode_ids(PACKED.encoding, PACKED.data, 12, PACKED.num_experts).reshape(shape)
    assert ids.tolist() == [[[0, 383, 256], [7, 1, 255]], [[-1, -1, -1], [300, 2, 9]]]
    validate(msgspec.structs.replace(PACKED, data=packed([383, 0, 256])))


def test_c17_n_rows_and_n_minus_1_rows_as_the_producer_says() -> None:
    validate(msgspec.structs.replace(TRACE, tokens=2, last_row="recorded"))
    validate(msgspec.structs.replace(TRACE, tokens=3, last_row="missing"))
    validate(msgspec.structs.replace(TRACE, start_row=5, tokens=8))


def test_a_mask_may_train_on_less_than_was_sampled() -> None:
    assert isinstance(ROLLOUT, Rollout)
    validate(msgspec.structs.replace(ROLLOUT, loss_mask=bytes(9)))


BOMBS = """
import sys, zstandard
import numpy, rollwire.kernels.delta.frames as frames, rollwire.schemas.routes as routes
from rollwire.schemas.errors import DeltaCorrupt, Refused

def peak_mib():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) / 1024

zeros = zstandard.compress(bytes(200 << 20))
body = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(200 << 20))
magic = (0xFD2FB528).to_bytes(4, "little")
window = magic + bytes([0x00, 0x98]) + b"\\x01\\x00\\x00"  # a frame that asks for a window of 512 MiB, one empty block
claims = magic + bytes([0xE0]) + (1 << 40).to_bytes(8, "little") + b"\\x01\\x00\\x00"
assert zstandard.get_frame_parameters(window).window_size == 512 << 20
assert zstandard.frame_content_size(claims) == 1 << 40
open("/proc/self/clear_refs", "w").write("5")
before = peak_mib()
for bomb in (zeros, body, window, claims):
    for size in (0, 1000, 1 << 20):
        for read, error in (
            (lambda: frames.unpack(bomb, size), DeltaCorrupt),
            (lambda: routes.planes_of("bits+zstd", bomb, size), Refused),
        ):
            try:
                read()
            except error:
                continue
            sys.exit(f"{len(bomb)} bytes passed as {size}")
print(peak_mib() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
def test_c82_bombs_cost_no_memory() -> None:
    """Zeros without end, frames without a size, a window of 512 MiB, a claim of 2**40 bytes: refused within 50 MiB."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", BOMBS], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 50
