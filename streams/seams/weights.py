"""The weights seam: what a sampling process needs of the weight plane.

`rollwire.consumers.weights.subscriber.WeightSubscriber` implements it; commands hand it to the fleet and the evaluator.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from rollwire.kernels.tensors import State
from rollwire.schemas.records import WeightVersion


class Staged(NamedTuple):
    """A version that is complete and verified, ready to be swapped in."""

    event: WeightVersion
    state: State
    stage_ms: float


class WeightSource(Protocol):
    def staged(self) -> Staged | None:
        """The newest staged version that is newer than the one swapped in; None = nothing new. Never blocks."""
        ...

    def wait(self, timeout_s: float) -> Staged:
        """Waits for a staged version. Raises `DeadlineExceeded`."""
        ...

    def swapped(self, staged: Staged, pause_ms: float, open_rollouts: int) -> None:
        """Reports the swap to `fleet-status`."""
        ...

    def stopped(self, open_rollouts: int) -> None:
        """Reports a clean stop to `fleet-status`."""
        ...

    def close(self) -> None: ...
