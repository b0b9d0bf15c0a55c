"""The target seam: what serves weights, and how a follower puts a version into it.

One version goes through a target like this, all calls from one thread:

    stage(update)     slow; the version before goes on serving
    swap()            short; from its return on the new version serves
    read_back(...)    a sample of what is served now, for the known-answer probe
    keep() | undo()   the probe was right, what `undo` needs may go | back to the version before

An exception of `stage` or `swap` is followed by `undo`, after which the version before serves, whole. A process that dies
anywhere leaves one whole version or the other, never something in between; what is only in memory dies with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from numpy.typing import NDArray

from rollwire.kernels.tensors import State
from rollwire.schemas.records import WeightVersion


class Change(Protocol):
    """A verified change of arrays in place (`rollwire.kernels.delta.prepare.Prepared` is one). Neither call can fail."""

    def apply(self) -> object: ...

    def undo(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Update:
    """A version that is complete and verified.

    `change` is None: `state` is the version; it is not written to, and stays as it is until the next `stage`.
    `change` is set: `state` is what `held` gave, still of the version before; `change.apply()` makes it the version.
    """

    event: WeightVersion
    state: State
    change: Change | None = None
    changed: frozenset[str] | None = None
    """Tensors that differ from the version before; None = any may."""


class Serving(NamedTuple):
    """What a target serves, in its own words, before the follower put anything into it."""

    lineage: str
    version: int
    state_digest: str


class Sample(NamedTuple):
    """Elements [start, end) of a tensor, by flat index over the whole tensor."""

    name: str
    start: int
    end: int


class Target(Protocol):
    @property
    def name(self) -> str:
        """What `fleet-status` calls it: "numpy", "torch", "folder", "vllm", "sglang"."""
        ...

    def held(self) -> State | None:
        """The arrays that are served, where they may be changed in place by `swap` (and by nothing else); {} = none yet.

        None: the target takes whole versions (files, another process), and the follower keeps a state of its own to build on.
        """
        ...

    def serving(self) -> Serving | None:
        """What is served at start, by the target's own books; None = nothing, or it can't say. Raises `TargetFailed`."""
        ...

    def stage(self, update: Update) -> None:
        """Everything slow, while the version before serves. Raises `TargetFailed`, `StateMismatch` (C27)."""
        ...

    def swap(self) -> float:
        """Serves the staged version; gives back how long serving stood still, in milliseconds. Raises `TargetFailed`."""
        ...

    def read_back(self, samples: Sequence[Sample]) -> list[NDArray[Any]] | None:
        """The bits (lanes of the tensor's dtype) that are served now, one array a sample; None = it can't be read.

        Raises `TargetFailed`.
        """
        ...

    def keep(self) -> None:
        """The version is proved. Never fails: what can't be cleaned up now is cleaned up later."""
        ...

    def undo(self) -> None:
        """Serves what was served before `stage`. Idempotent, and nothing where nothing was staged.

        Raises `TargetFailed` where even that is impossible (an engine that is gone): the follower reports it and stages anew.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class Rereadable(Protocol):
    """A target whose weights outlive the process: after a restart they are read back and built on."""

    def reread(self) -> State:
        """The served state, whole; not verified. Raises `TargetFailed`."""
        ...


@runtime_checkable
class Healing(Protocol):
    """A target in another process, which may be started anew behind the follower's back."""

    def heal(self) -> bool:
        """Puts back what was kept last where something else is served; True: it had to. Between two versions only.

        Raises `TargetFailed` where that is impossible now.
        """
        ...
