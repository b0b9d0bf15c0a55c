"""What the trainer asserts of a step plan before it computes. It never filters (law 6): a plan that breaks a law halts it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.schemas.errors import PlanViolation
from rollwire.schemas.records import Microbatch, PackedBatch


class Arrays(NamedTuple):
    """A microbatch as arrays. B sequences, T tokens laid end to end, S trained tokens in order."""

    cu_seqlens: NDArray[np.int32]  # [B + 1]
    tokens_T: NDArray[np.int64]
    mask_T: NDArray[np.bool_]  # S of them are set
    logp_S: NDArray[np.float32]  # log mu, as sampled
    versions_S: NDArray[np.int64]
    advantages_B: NDArray[np.float32]
    sources_B: tuple[tuple[str, str], ...]  # environment and fleet; "" = not known

    @property
    def target_S(self) -> NDArray[np.int64]:
        """Where the trained tokens stand in T, ascending. The distribution of each stands at the token before it."""
        return np.flatnonzero(self.mask_T).astype(np.int64)

    @property
    def sequence_S(self) -> NDArray[np.int64]:
        """The sequence of each trained token."""
        return np.searchsorted(self.cu_seqlens, self.target_S, side="right").astype(np.int64) - 1

    @property
    def positions_T(self) -> NDArray[np.int64]:
        """The place of each token in its sequence."""
        starts_B, lengths_B = self.cu_seqlens[:-1], np.diff(self.cu_seqlens)
        return np.arange(len(self.tokens_T)) - np.repeat(starts_B, lengths_B).astype(np.int64)


class Expected(NamedTuple):
    """What the next plan of this rank must say."""

    model: str
    lineage: str
    step: int
    version: int  # the version held, to which the step is applied
    rank: int
    ranks: int


def check_plan(batch: PackedBatch, expected: Expected) -> list[Arrays]:
    """The microbatches of `batch` as arrays; raises `PlanViolation` where the plan is not the expected one.

    Checked: whose it is, step order, base version, rank, and for every single trained token
    `0 <= base_version - version <= max_lag_versions` (law 6: judged for the version of use, by the oldest span).
    """
    for name, got, want in (
        ("model", batch.model, expected.model),
        ("lineage", batch.lineage, expected.lineage),
        ("step", batch.step, expected.step),
        ("base version", batch.base_version, expected.version),
        ("rank", batch.rank, expected.rank),
        ("ranks", batch.ranks, expected.ranks),
    ):
        if got != want:
            raise PlanViolation(f"{_name(batch)}: {name} is {got!r}, the trainer expects {want!r}")
    lag = batch.base_version - batch.oldest_version
    if not 0 <= lag <= batch.max_lag_versions:
        raise PlanViolation(
            f"{_name(batch)}: its oldest span lags {lag} versions of at most {batch.max_lag_versions}"
        )
    return [_arrays(batch, index, micro) for index, micro in enumerate(batch.microbatches)]


def check_agreement(digests: Sequence[str], step: int) -> None:
    """All ranks hold slices of one plan."""
    if len(set(digests)) > 1:
        raise PlanViolation(f"the ranks hold different plans for step {step}: {', '.join(digests)}")


def _arrays(batch: PackedBatch, index: int, micro: Microbatch) -> Arrays:
    arrays = Arrays(
        cu_seqlens=np.frombuffer(micro.cu_seqlens, "<i4"),
        tokens_T=np.frombuffer(micro.token_ids, "<u4").astype(np.int64),
        mask_T=np.frombuffer(micro.loss_mask, "u1").astype(np.bool_),
        logp_S=np.frombuffer(micro.logprobs, "<f4"),
        versions_S=np.frombuffer(micro.versions, "<i8"),
        advantages_B=np.frombuffer(micro.advantages, "<f4"),
        sources_B=tuple(zip(_labels(micro, micro.environments), _labels(micro, micro.fleets), strict=True)),
    )
    # Lengths, boundaries and budget hold for whatever passed the codec; the lag is asserted again, for every token.
    if arrays.versions_S.size:
        oldest, newest = int(arrays.versions_S.min()), int(arrays.versions_S.max())
        if newest > batch.base_version or batch.base_version - oldest > batch.max_lag_versions:
            raise PlanViolation(
                f"{_name(batch)}, microbatch {index}: tokens of versions {oldest} to {newest}, at most "
                f"{batch.max_lag_versions} behind {batch.base_version} are allowed"
            )
    return arrays


def _labels(micro: Microbatch, labels: tuple[str, ...]) -> tuple[str, ...]:
    return labels or ("",) * len(micro.rollout_ids)


def _name(batch: PackedBatch) -> str:
    return f"plan of step {batch.step}, rank {batch.rank}, lineage {batch.lineage}"
