"""Lays chosen groups out as the step plan of every rank: the arrays of `PackedBatch`, and the digest of the whole plan.

Legend: B sequences of a microbatch, T their tokens laid end to end, S their trained (masked) tokens laid end to end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import blake3
import msgspec
import numpy as np

from rollwire.kernels.cost import CostModel
from rollwire.kernels.packing import plan_microbatches
from rollwire.kernels.packing_search import Objective
from rollwire.schemas.records import Cut, Group, Member, Microbatch, PackedBatch, Position, Rollout, Seal
from rollwire.streams.pack_cohort import Cohort

_TOKEN_DTYPES: Final[dict[str, np.dtype[Any]]] = {name: np.dtype("<" + name) for name in ("u1", "u2", "u4")}
_TOKEN: Final = np.dtype("<u4")
_LARGE: Final = 4_096

# A rank's place in a slot of a lockstep plan that has nothing for it.
_EMPTY: Final = Microbatch(
    rollout_ids=(),
    cu_seqlens=bytes(4),
    token_ids=b"",
    loss_mask=b"",
    logprobs=b"",
    versions=b"",
    advantages=b"",
    traces=(),
)


class PlanFrame(NamedTuple):
    """What a plan is for: everything but the groups."""

    model: str
    lineage: str
    step: int
    base_version: int
    ranks: int
    token_budget: int
    max_lag_versions: int
    cost: CostModel
    cut: Cut
    objective: Objective = "sum"
    context_parallel: int = 1  # devices of a rank; `token_budget` is what all of them have together
    newest_revert: int | None = None  # the last version that was a revert
    cohort: Cohort | None = None  # of the groups, those of live traffic; they stand among the groups


def trained_members(group: Group) -> list[Member]:
    """The members that are trained on: those with an advantage."""
    return [member for member in group.members if member.advantage is not None]


def token_count(member: Member) -> int:
    """T of one rollout."""
    return len(member.rollout.token_ids) // _TOKEN_DTYPES[member.rollout.token_dtype].itemsize


def oldest_version(groups: Sequence[Group]) -> int:
    """Of all spans of all members: a group lives or dies as a whole."""
    return min(span.version for group in groups for member in group.members for span in member.rollout.spans)


def lay_out(groups: Sequence[Group], frame: PlanFrame) -> tuple[PackedBatch, ...]:
    """One `PackedBatch` per rank, all with the digest of the whole plan. Equal inputs give equal bytes.

    Raises `Refused` where a sequence is empty or longer than the budget, `ConfigError` for impossible settings.
    """
    members = [member for group in groups for member in trained_members(group)]
    lengths_B = [token_count(member) for member in members]
    layout = plan_microbatches(
        lengths_B,
        frame.cost.costs(lengths_B),
        frame.ranks,
        frame.token_budget // frame.context_parallel,
        objective=frame.objective,
        context_parallel=frame.context_parallel,
    )
    rewards = [m.reward for group in groups for m in group.members if m.reward is not None]
    reward_mean, oldest = math.fsum(rewards) / len(rewards), oldest_version(groups)
    cohort = frame.cohort
    total_tokens, group_ids = sum(lengths_B), tuple(group.group_id for group in groups)
    batches = [
        PackedBatch(
            model=frame.model,
            lineage=frame.lineage,
            step=frame.step,
            base_version=frame.base_version,
            rank=rank,
            ranks=frame.ranks,
            token_budget=frame.token_budget,
            max_lag_versions=frame.max_lag_versions,
            total_sequences=len(members),
            total_tokens=total_tokens,
            group_ids=group_ids,
            oldest_version=oldest,
            reward_mean=reward_mean,
            microbatches=tuple(build_microbatch([members[i] for i in indices]) for indices in microbatches),
            plan_digest="",
            cut=frame.cut,
            newest_revert=frame.newest_revert,
            coverage=() if cohort is None else cohort.coverage,
            cohort_size=0 if cohort is None else cohort.size,
            cohort_mean=None if cohort is None else cohort.mean,
            max_age_ms=None if cohort is None else cohort.max_age_ms,
        )
        for rank, microbatches in enumerate(layout)
    ]
    digest = plan_digest(batches)
    return tuple(msgspec.structs.replace(batch, plan_digest=digest) for batch in batches)


def build_microbatch(members: Sequence[Member]) -> Microbatch:
    """The arrays of one microbatch, in the order of `members`; each must have an advantage."""
    if not members:
        return _EMPTY
    rollouts = [member.rollout for member in members]
    tokens = [_tokens(r) for r in rollouts]
    trained = [_trained(r) for r in rollouts]
    seals = tuple(r.sealed for r in rollouts)
    cu_seqlens = np.zeros(len(rollouts) + 1, "<i4")
    np.cumsum([len(t) // _TOKEN.itemsize for t in tokens], out=cu_seqlens[1:])
    return Microbatch(
        rollout_ids=tuple(r.rollout_id for r in rollouts),
        cu_seqlens=cu_seqlens.tobytes(),
        token_ids=b"".join(tokens),
        loss_mask=b"".join(r.loss_mask for r in rollouts),
        logprobs=b"".join(logprobs for logprobs, _ in trained),
        versions=b"".join(versions for _, versions in trained),
        advantages=np.array([member.advantage for member in members], "<f4").tobytes(),
        traces=tuple(member.trace for member in members),
        environments=tuple(r.environment for r in rollouts),
        fleets=tuple(r.fleet for r in rollouts),
        seals=seals if any(seals) else (),
    )


def _tokens(rollout: Rollout) -> bytes:
    """[T] u4."""
    dtype = _TOKEN_DTYPES[rollout.token_dtype]
    if dtype == _TOKEN:
        return rollout.token_ids
    return np.frombuffer(rollout.token_ids, dtype).astype(_TOKEN).tobytes()


def _trained(rollout: Rollout) -> tuple[bytes, bytes]:
    """Logprobs [S] f4 and versions [S] i8 of the trained tokens: of the sampled ones, those that the mask keeps."""
    versions = b"".join(
        span.version.to_bytes(8, "little", signed=True) * (span.end - span.start) for span in rollout.spans
    )
    # The mask keeps nothing but sampled tokens: where it keeps as many as were sampled, it keeps all of them.
    if rollout.loss_mask.count(1) * 4 == len(rollout.logprobs):
        return rollout.logprobs, versions
    segments = rollout.segments
    mask_T = np.frombuffer(rollout.loss_mask, np.uint8)
    sampled_T = np.repeat([s.kind == "sampled" for s in segments], [s.end - s.start for s in segments])
    kept = mask_T[sampled_T] != 0
    logprobs_S = np.frombuffer(rollout.logprobs, "<f4")[kept]
    return logprobs_S.tobytes(), np.frombuffer(versions, "<i8")[kept].tobytes()


def plan_digest(batches: Sequence[PackedBatch]) -> str:
    """blake3 (hex) over the plan of all ranks in a canonical form.

    Covered: what is trained on and how (frame, groups, microbatches, trace positions), rank by rank. Not covered: the
    cut and this digest, so that a replay which follows other offsets can still be compared; and the names of
    environments and fleets, which only figures are sorted by. Each field is its length
    as 8 little-endian bytes, then its bytes; integers are decimal ASCII. Seals and the cohort are covered where there are
    any: what opens the tokens, and what the advantages were taken against.
    """
    hasher = blake3.blake3()
    for batch in sorted(batches, key=lambda batch: batch.rank):
        _feed(
            hasher,
            batch.model,
            batch.lineage,
            batch.step,
            batch.base_version,
            batch.rank,
            batch.ranks,
            batch.token_budget,
            batch.max_lag_versions,
            batch.total_sequences,
            batch.total_tokens,
            batch.oldest_version,
            np.array(batch.reward_mean, "<f8").tobytes(),
            len(batch.group_ids),
            *batch.group_ids,
            len(batch.microbatches),
        )
        for microbatch in batch.microbatches:
            _feed(
                hasher,
                len(microbatch.rollout_ids),
                *microbatch.rollout_ids,
                microbatch.cu_seqlens,
                microbatch.token_ids,
                microbatch.loss_mask,
                microbatch.logprobs,
                microbatch.versions,
                microbatch.advantages,
                *(_trace(trace) for trace in microbatch.traces),
            )
            if microbatch.seals:
                _feed(hasher, "seals", *(part for seal in microbatch.seals for part in _seal(seal)))
        if batch.cohort_size:
            _feed(hasher, "cohort", batch.cohort_size, len(batch.coverage))
            for row in batch.coverage:
                _feed(hasher, row.outcome, row.rollouts, row.signalled, row.scored)
            mean = b"" if batch.cohort_mean is None else np.array(batch.cohort_mean, "<f8").tobytes()
            _feed(hasher, mean, "" if batch.max_age_ms is None else batch.max_age_ms)
    return hasher.hexdigest()


def _trace(trace: Position | None) -> str:
    return "" if trace is None else f"{trace.topic}/{trace.partition}/{trace.offset}"


def _seal(seal: Seal | None) -> tuple[str | int | bytes, ...]:
    return ("",) if seal is None else (seal.subject, seal.key, seal.nonce, seal.tag)


def _feed(hasher: blake3.blake3, *fields: str | int | bytes) -> None:
    """Small fields go to the hasher together, arrays as they are."""
    parts: list[bytes] = []
    for field in fields:
        data = field if isinstance(field, bytes) else str(field).encode()
        parts.append(len(data).to_bytes(8, "little"))
        if len(data) < _LARGE:
            parts.append(data)
        else:
            hasher.update(b"".join(parts))
            hasher.update(data)
            parts.clear()
    hasher.update(b"".join(parts))
