"""What a session of the trainer needs of a model and its ranks. Needs no torch.

Two learners: the policy on torch (`ranks.RankGroup`), and an arithmetic one whose weights prove what was trained
(`arithmetic.ArithmeticLearner`). Which versions are committed, published and replayed is decided elsewhere, the same for
both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from rollwire.consumers.trainer.commit import CheckpointWriter
from rollwire.consumers.trainer.figures import Figures
from rollwire.kernels.tensors import State
from rollwire.schemas.records import Claim, PackedBatch


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that was read and checked: its digest, and the offset after it."""

    digest: str
    end: int


class Learner(Protocol):
    """Made once a session, after the older trainer is fenced. Used by one thread.

    `begin` or `restore`, then `start`; then for each step `read`, `compute`, `apply`, each finished by every rank before
    the next. The same plans from the same weights give the same bits (law 9).
    """

    @property
    def settings(self) -> dict[str, str]:
        """What the bits of a step depend on beyond its plan."""
        ...

    @property
    def plan(self) -> PackedBatch | None:
        """Rank 0's slice of the plan that was read and is not applied yet."""
        ...

    def begin(self) -> None:
        """The weights of a new lineage. Raises `ConfigError` where there are none."""
        ...

    def restore(self, claim: Claim) -> tuple[int, ...]:
        """The weights of a checkpoint; returns the offsets, by rank, that it goes on from. Raises `ObjectMissing`,
        `DeltaCorrupt`, `StateMismatch`."""
        ...

    def start(
        self,
        version: int,
        offsets: Sequence[int],
        last_digest: str | None,
        newest_revert: int | None = None,
    ) -> None:
        """Every rank holds these weights as `version` and reads on from its offset; `last_digest` is the plan of the last
        step taken, `newest_revert` the last version up to `version` that was a revert."""
        ...

    def move(
        self, version: int, offsets: Sequence[int], last_digest: str | None, newest_revert: int | None
    ) -> None:
        """As `start`, with the weights that every rank has by now: over a revert that went back to them."""
        ...

    def read(self, timeout_s: float) -> list[Head] | None:
        """The next plan's heads by rank; None when it is not there after `timeout_s`. Raises `PlanViolation`,
        `OffsetLost`, `DeadlineExceeded` where some ranks have it and others do not get it."""
        ...

    def compute(self) -> list[Figures]:
        """What the step changes, and what each rank measured; the weights stay as they are."""
        ...

    def apply(self) -> float:
        """Takes the step; returns the gradient's norm."""
        ...

    def rate(self, step: int) -> float:
        """The learning rate of a step, for `train-steps`."""
        ...

    def published(self) -> State:
        """The weights as samplers get them; the state owns its memory."""
        ...

    def checkpoint(self, step: int, next_offsets: tuple[int, ...]) -> CheckpointWriter:
        """A checkpoint of the weights as they are now, which is after `step`; written later, in the background."""
        ...

    def close(self) -> None: ...
