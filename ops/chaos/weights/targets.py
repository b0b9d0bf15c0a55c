"""Targets as a follower sees them that dies at one of its effects, or whose target fails it; and what a folder really serves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from numpy.typing import NDArray

from rollwire.consumers.weights.anchor import AnchorFile, read_anchor
from rollwire.consumers.weights.targets.folder import BOOK, CURRENT, Book, FolderTarget
from rollwire.consumers.weights.targets.numpy_state import NumpyTarget
from rollwire.consumers.weights.targets.target import Sample, Serving, Update
from rollwire.kernels.tensors import State
from rollwire.ops.chaos.weights.effects import Effects
from rollwire.ops.chaos.weights.states import LAST, digest_of, same_bits, state_of
from rollwire.schemas.errors import ProbeFailed, TargetFailed
from rollwire.schemas.records import WeightVersion

Kind = Literal["numpy", "slice", "folder"]
KINDS: Final[tuple[Kind, ...]] = ("numpy", "slice", "folder")
Failure = Literal["stage", "swap, before it", "swap, after it", "reading back", "the user's probe"]
FAILURES: Final[tuple[Failure, ...]] = (
    "stage",
    "swap, before it",
    "swap, after it",
    "reading back",
    "the user's probe",
)
FAILS_AT: Final = 2  # the version


class CrashTarget:
    """Implements `Target`. `failure`: once, at version `FAILS_AT`, nobody dies but the target fails. `parts`: it holds a
    slice."""

    def __init__(
        self,
        inner: NumpyTarget | FolderTarget,
        effects: Effects,
        failure: Failure | None = None,
        *,
        parts: bool = False,
    ) -> None:
        self._inner = inner
        self._effects = effects
        self._failure = failure
        self._parts = parts
        self._version = -1
        self._kept: int | None = None
        self.torn = ""  # what was found after an undo, where it was not the version before

    @property
    def name(self) -> str:
        return self._inner.name

    def held(self) -> State | None:
        return self._inner.held()

    def serving(self) -> Serving | None:
        return self._inner.serving()

    def stage(self, update: Update) -> None:
        self._version = update.event.version
        self._fail("stage")
        self._effects.around(f"stage {self._version}", lambda: self._inner.stage(update))

    def swap(self) -> float:
        self._fail("swap, before it")
        pause_ms = self._effects.around(f"swap {self._version}", self._inner.swap)
        self._fail("swap, after it")
        return pause_ms

    def read_back(self, samples: Sequence[Sample]) -> list[NDArray[Any]] | None:
        self._fail("reading back")
        return self._effects.around(f"read back {self._version}", lambda: self._inner.read_back(samples))

    def keep(self) -> None:
        self._effects.around(f"keep {self._version}", self._inner.keep)
        self._kept = self._version

    def undo(self) -> None:
        self._effects.around(f"undo {self._version}", self._inner.undo)
        if self._kept is not None and not self.serves(self._kept):
            self.torn = f"after version {self._version} was undone, something else than version {self._kept} is served"

    def close(self) -> None:
        self._inner.close()

    def serves(self, version: int) -> bool:
        """Whether all that is served is this version, bit by bit."""
        return same_bits(served_by(self._inner), state_of(version), parts=self._parts)

    def probe(self, event: WeightVersion) -> None:
        """The known answer: all that is served is that version, bit by bit. Raises `ProbeFailed`."""
        self._effects.check()
        if not self.serves(event.version):
            raise ProbeFailed(f"what is served as version {event.version} is not that version")
        self._fail("the user's probe")

    def _fail(self, here: Failure) -> None:
        if self._failure == here and self._version == FAILS_AT:
            self._failure = None
            raise TargetFailed(f"by rule: {here}")


class CrashFolder(CrashTarget):
    """With what it serves after a restart. Implements `Rereadable`."""

    def __init__(self, inner: FolderTarget, effects: Effects, failure: Failure | None = None) -> None:
        super().__init__(inner, effects, failure)
        self._folder = inner

    def reread(self) -> State:
        return self._folder.reread()


def served_by(target: NumpyTarget | FolderTarget) -> State:
    """All that is served."""
    held = target.held()
    return target.reread() if isinstance(target, FolderTarget) else (held or {})


def version_in(folder: Path) -> int | None:
    """The version that a reader of the folder finds, None where it finds nothing at all. Raises `TargetFailed` where what it
    finds is not, bit by bit, the version that it says it is."""
    current = folder / CURRENT
    if not current.is_symlink():
        return None
    try:
        linked = current.resolve(strict=True)
        book = msgspec.json.decode((linked / BOOK).read_bytes(), type=Book)
        state = read_anchor(
            [AnchorFile(f.name, f.read_bytes()) for f in sorted(linked.glob("*.safetensors"))]
        )
    except (OSError, msgspec.MsgspecError) as error:
        raise TargetFailed(f"{current} leads to nothing whole: {error}") from error
    if not 0 <= book.version <= LAST or book.state_digest != digest_of(book.version):
        raise TargetFailed(f"{current} says version {book.version} with the digest {book.state_digest[:16]}")
    if not same_bits(state, state_of(book.version)):
        raise TargetFailed(f"{current} says version {book.version} and is another one")
    return book.version
