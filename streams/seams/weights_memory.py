"""The in-memory twin of the weights seam: versions are offered by hand, swaps are remembered."""

from __future__ import annotations

import threading
from typing import NamedTuple

from rollwire.kernels.tensors import State
from rollwire.schemas.errors import DeadlineExceeded
from rollwire.schemas.records import Claim, WeightVersion
from rollwire.streams.seams.weights import Staged


class Swap(NamedTuple):
    version: int
    pause_ms: float
    open_rollouts: int


class MemoryWeights:
    """Implements `WeightSource`. `offer` stages a version; only the newest one is kept. Thread-safe."""

    def __init__(self, *, model: str = "policy", lineage: str = "lineage") -> None:
        self._model = model
        self._lineage = lineage
        self._changed = threading.Condition()
        self._newest: Staged | None = None
        self._served = -1
        self.swaps: list[Swap] = []
        self.stopped_with: int | None = None  # open rollouts at the clean stop

    def offer(self, version: int, state: State, *, published_us: int = 1_767_225_600_000_000) -> None:
        claim = Claim(key=f"memory/{version}", size=1, sha256="0" * 64)
        full_bytes = sum(tensor.nbytes for tensor in state.values())
        elements = sum(tensor.bits.size for tensor in state.values())
        event = WeightVersion(
            model=self._model,
            lineage=self._lineage,
            version=version,
            base_version=None if version == 0 else version - 1,
            kind="anchor" if version == 0 else "delta",
            step=version,
            manifest=claim,
            anchor=claim if version == 0 else None,
            checkpoint=None,
            state_digest=f"{version:032x}",
            full_bytes=full_bytes,
            stored_bytes=full_bytes,
            changed_elements=elements,
            total_elements=elements,
            published_us=published_us,
        )
        with self._changed:
            self._newest = Staged(event, state, 0.0)
            self._changed.notify_all()

    def staged(self) -> Staged | None:
        with self._changed:
            return self._fresh()

    def wait(self, timeout_s: float) -> Staged:
        with self._changed:
            if not self._changed.wait_for(lambda: self._fresh() is not None, timeout_s):
                raise DeadlineExceeded(
                    f"no version newer than {self._served} was offered within {timeout_s:g} s"
                )
            fresh = self._fresh()
        if fresh is None:
            raise DeadlineExceeded("the offered version was taken by another caller")
        return fresh

    def swapped(self, staged: Staged, pause_ms: float, open_rollouts: int) -> None:
        with self._changed:
            self._served = staged.event.version
            self.swaps.append(Swap(staged.event.version, pause_ms, open_rollouts))
            self._changed.notify_all()

    def stopped(self, open_rollouts: int) -> None:
        self.stopped_with = open_rollouts

    def close(self) -> None:
        """Nothing to release."""

    def _fresh(self) -> Staged | None:
        newest = self._newest
        return newest if newest is not None and newest.event.version > self._served else None
