"""The arrays of a plan against a slow, obvious construction; its digest; two ranks against one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.kernels.cost import CostModel
from rollwire.schemas.errors import Refused
from rollwire.schemas.records import Cut, Group, Member, PackedBatch, Position, Segment, Span
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.pack_layout import PlanFrame, build_microbatch, lay_out, plan_digest
from rollwire.streams.seams.log import Record

NOW_US = 1_767_225_600_000_000


class MakeGroup(Protocol):
    def __call__(
        self,
        number: int,
        versions: Sequence[int] = (0,),
        *,
        rewards: Sequence[float | None] = (1.0, 0.0),
        lengths: Sequence[int] | None = None,
    ) -> Group: ...


def frame(ranks: int = 1, token_budget: int = 32) -> PlanFrame:
    cut = Cut(inputs=(Position(topic="groups", partition=0, offset=3),), clock_us=NOW_US)
    lineage = "0197a1b2-0000-7000-8000-0000000000aa"
    return PlanFrame("policy", lineage, 4, 3, ranks, token_budget, 3, CostModel(10.0, 1.0), cut)


def with_tool_turn(member: Member, dtype: str) -> Member:
    """Prompt, sampled, tool, sampled; the first sampled token is not trained on; two versions."""
    rollout = member.rollout
    tokens = np.frombuffer(rollout.token_ids, "<u1").astype("<" + dtype)
    total = tokens.size
    mask = np.ones(total, np.uint8)
    mask[[0, 1, 3]] = 0
    sampled = total - 2
    return msgspec.structs.replace(
        member,
        rollout=msgspec.structs.replace(
            rollout,
            token_ids=tokens.tobytes(),
            token_dtype=dtype,
            segments=(
                Segment(kind="prompt", start=0, end=1),
                Segment(kind="sampled", start=1, end=3),
                Segment(kind="tool", start=3, end=4),
                Segment(kind="sampled", start=4, end=total),
            ),
            loss_mask=mask.tobytes(),
            logprobs=np.linspace(-2.0, -0.5, sampled).astype("<f4").tobytes(),
            spans=(Span(version=2, start=0, end=2), Span(version=3, start=2, end=sampled)),
        ),
    )


def slow(members: Sequence[Member]) -> tuple[list[int], list[float], list[int]]:
    """Token by token: trained tokens with their logprobs and versions."""
    tokens: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for member in members:
        rollout = member.rollout
        ids = np.frombuffer(rollout.token_ids, "<" + rollout.token_dtype)
        logp = np.frombuffer(rollout.logprobs, "<f4")
        at = 0
        for segment in rollout.segments:
            for t in range(segment.start, segment.end):
                if segment.kind != "sampled":
                    continue
                if rollout.loss_mask[t]:
                    tokens.append(int(ids[t]))
                    logprobs.append(float(logp[at]))
                    versions.append(next(s.version for s in rollout.spans if s.start <= at < s.end))
                at += 1
    return tokens, logprobs, versions


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4"])
def test_the_arrays_of_a_microbatch(make_group: MakeGroup, dtype: str) -> None:
    plain = make_group(1, (1, 2), rewards=(1.0, 0.0, 0.5)).members
    mixed = make_group(2, lengths=(7, 9)).members
    members = [plain[0], with_tool_turn(mixed[0], dtype), plain[2], with_tool_turn(mixed[1], "u1")]
    batch = build_microbatch(members)
    tokens, logprobs, versions = slow(members)
    cu = np.frombuffer(batch.cu_seqlens, "<i4")
    assert list(np.diff(cu)) == [len(m.rollout.loss_mask) for m in members]
    tokens_T = np.frombuffer(batch.token_ids, "<u4")
    mask_T = np.frombuffer(batch.loss_mask, np.uint8)
    assert tokens_T.size == mask_T.size == cu[-1]
    assert list(tokens_T[mask_T != 0]) == tokens
    assert list(np.frombuffer(batch.logprobs, "<f4")) == logprobs
    assert list(np.frombuffer(batch.versions, "<i8")) == versions
    assert list(np.frombuffer(batch.advantages, "<f4")) == [m.advantage for m in members]
    assert batch.rollout_ids == tuple(m.rollout.rollout_id for m in members)
    assert batch.traces == tuple(m.trace for m in members)


def rows(batches: Sequence[PackedBatch]) -> list[tuple[str, bytes, float]]:
    """Every sequence of a plan with its tokens and its advantage, in a canonical order."""
    found: list[tuple[str, bytes, float]] = []
    for batch in batches:
        for m in batch.microbatches:
            cu = np.frombuffer(m.cu_seqlens, "<i4")
            advantages = np.frombuffer(m.advantages, "<f4")
            tokens = np.frombuffer(m.token_ids, "<u4")
            for i, rollout_id in enumerate(m.rollout_ids):
                found.append((rollout_id, tokens[cu[i] : cu[i + 1]].tobytes(), float(advantages[i])))
    return sorted(found)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(2, 32), min_size=2, max_size=5), min_size=1, max_size=6), st.integers(2, 5)
)
def test_more_ranks_hold_what_one_holds(make_group: MakeGroup, sizes: list[list[int]], ranks: int) -> None:
    groups = [
        make_group(i, (1, 2, 3), rewards=[float(k) for k in range(len(lengths))], lengths=lengths)
        for i, lengths in enumerate(sizes)
    ]
    one, many = lay_out(groups, frame()), lay_out(groups, frame(ranks))
    assert rows(one) == rows(many)
    assert len(many) == ranks
    assert len({batch.plan_digest for batch in many}) == 1
    for batch in (*one, *many):
        assert batch.total_sequences == sum(len(lengths) for lengths in sizes)
        assert batch.total_tokens == sum(sum(lengths) for lengths in sizes)
        assert batch.group_ids == tuple(group.group_id for group in groups)
        assert all(np.frombuffer(m.cu_seqlens, "<i4")[-1] <= 32 for m in batch.microbatches)
        # What is laid out passes the codec, which checks every array again.
        out = outgoing(batch, source="test", time_us=NOW_US)
        assert out.partition == batch.rank
        assert (
            decode_record(Record("packed-batches", batch.rank, 0, 0, out.key, out.value, out.headers))
            == batch
        )


def test_the_digest_covers_the_plan_but_not_the_cut(make_group: MakeGroup) -> None:
    groups = [make_group(1), make_group(2)]
    plan = lay_out(groups, frame(2))
    assert plan == lay_out(groups, frame(2))
    other_cut = frame(2)._replace(cut=Cut(inputs=(), clock_us=NOW_US + 1))
    assert lay_out(groups, other_cut)[0].plan_digest == plan[0].plan_digest
    assert plan_digest(plan[::-1]) == plan[0].plan_digest
    changed = [
        lay_out(groups[::-1], frame(2)),
        lay_out(groups, frame(1)),
        lay_out(groups, frame(2)._replace(step=5)),
        lay_out(groups, frame(2, token_budget=16)),
        lay_out([groups[0], msgspec.structs.replace(groups[1], members=groups[1].members[:1])], frame(2)),
    ]
    digests = {plan[0].plan_digest, *(c[0].plan_digest for c in changed)}
    assert len(digests) == 1 + len(changed)
    first = plan[0].microbatches[0]
    for field in ("token_ids", "loss_mask", "logprobs", "versions", "advantages"):
        data = bytearray(getattr(first, field))
        data[0] ^= 1
        bad = msgspec.structs.replace(first, **{field: bytes(data)})
        bent = msgspec.structs.replace(plan[0], microbatches=(bad, *plan[0].microbatches[1:]))
        assert plan_digest([bent, plan[1]]) != plan[0].plan_digest


def test_lockstep_gives_every_rank_as_many_microbatches_and_keeps_empty_places(make_group: MakeGroup) -> None:
    # Five sequences that fill a microbatch each, two ranks: one place of the six stays empty.
    groups = [make_group(1, rewards=(1.0, 0.0, 0.5, 0.2, 0.1), lengths=[32] * 5)]
    plan = lay_out(groups, frame(2)._replace(objective="lockstep"))
    assert [len(batch.microbatches) for batch in plan] == [3, 3]
    sizes = [len(m.rollout_ids) for batch in plan for m in batch.microbatches]
    assert sorted(sizes) == [0, 1, 1, 1, 1, 1]
    assert rows(plan) == rows(lay_out(groups, frame(2)))
    for batch in plan:
        out = outgoing(batch, source="test", time_us=NOW_US)
        record = Record("packed-batches", batch.rank, 0, 0, out.key, out.value, out.headers)
        assert decode_record(record) == batch
    assert sum(len(batch.microbatches) for batch in lay_out(groups, frame(2))) == 5


def test_devices_of_a_rank_share_a_budget_for_longer_sequences(make_group: MakeGroup) -> None:
    groups = [make_group(1, lengths=[60, 20])]
    with pytest.raises(Refused, match="over_budget"):
        lay_out(groups, frame(1, token_budget=32))
    (plan,) = lay_out(groups, frame(1, token_budget=64)._replace(context_parallel=2))
    assert plan.token_budget == 64
    assert [len(m.rollout_ids) for m in plan.microbatches] == [1, 1]
