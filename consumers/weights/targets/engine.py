"""An inference engine behind HTTP as a target: a version goes through a folder of safetensors that the engine reads.

    stage   the folder is written, synced and renamed into place; the engine serves on
    swap    a note that the engine is being written to; pause; load; (fingerprint); the folder's link; resume; the note goes
    undo    the same, with the folder of the version before

A process that dies in the swap leaves the engine paused, and the note: whoever comes next takes nothing for granted and
loads a version anew. An engine that takes neither the new version nor the one before stays paused: it queues, and samples
nothing from torn weights.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeVar

import msgspec
import structlog
from numpy.typing import NDArray

from rollwire.consumers.weights.targets.folder import FolderTarget
from rollwire.consumers.weights.targets.target import Sample, Serving, Update
from rollwire.kernels.tensors import State
from rollwire.schemas.errors import ConfigError, EngineError, StateMismatch, TargetFailed

NOTE: Final = "loading"  # in the root, while the engine's weights are being written
KNOWN: Final = "engine.json"  # in the root: what the engine holds, as it was when it was loaded
_log = structlog.get_logger()
Answer = TypeVar("Answer")


class EngineWeights(Protocol):
    """The calls of one engine. Each raises `EngineUnavailable` or `EngineRefused`."""

    @property
    def name(self) -> str: ...

    def label(self) -> str:
        """What the engine calls its weights."""
        ...

    def pause(self) -> None:
        """No token is sampled until `resume`; running requests stay. Idempotent."""
        ...

    def load(self, folder: Path, label: str) -> None: ...

    def resume(self) -> None: ...

    def fingerprint(self) -> str:
        """A digest of the weights as the engine holds them: equal folders give equal ones in the same engine."""
        ...

    def close(self) -> None: ...


class Loaded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an engine was seen to hold."""

    label: str
    state_digest: str
    fingerprint: str  # "" = was not taken


class _Step(NamedTuple):
    folder: Path
    label: str
    state_digest: str  # "" = not known: the engine's own first weights


def version_label(version: int) -> str:
    """What engines call a version of ours, and report in the spans of `weight_versions`."""
    return str(version)


def tensor_names(folder: Path) -> frozenset[str]:
    """The tensors of a folder of safetensors, by the files' headers. Raises `ConfigError` for a file that has none."""
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        try:
            with path.open("rb") as file:
                header = msgspec.json.decode(
                    file.read(int.from_bytes(file.read(8), "little")), type=dict[str, Any]
                )
        except (OSError, MemoryError, OverflowError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{path} is no safetensors file: {error}") from error
        names |= header.keys() - {"__metadata__"}
    return frozenset(names)


class EngineTarget:
    """Implements `Target`, `Rereadable` and `Healing`.

    `folder` must be on a file system that the engine sees, under `seen_at` where its root has another name there. `first` is
    the folder that the engine was started with, to go back to where no version of ours was loaded before; no version may
    lack one of its tensors (C27).

    `proof`: "label" believes an engine that says it took the folder; "fingerprint" also hashes its weights inside the pause:
    a changed version must change them, and one that was served before must give what it gave then.
    """

    def __init__(
        self,
        engine: EngineWeights,
        folder: FolderTarget,
        root: Path,
        *,
        seen_at: Path | None = None,
        first: Path | None = None,
        proof: Literal["label", "fingerprint"] = "label",
    ) -> None:
        self._engine = engine
        self._folder = folder
        self._root = root
        self._seen_at = seen_at
        self._first = first
        self._proof = proof
        self._known: dict[str, str] = {}  # state digest -> fingerprint, of this engine's life
        self._held: Loaded | None = None
        self._staged: _Step | None = None
        self._before: _Step | None = None
        self._written = False  # the engine's weights were touched, and are not known to be whole again
        self._closed = False
        self._names = frozenset() if first is None else tensor_names(first)

    @property
    def name(self) -> str:
        return self._engine.name

    def held(self) -> None:
        return None

    def heal(self) -> bool:
        """An engine that was started anew calls its weights by another name: it is given those of the folder's link again.

        Also ends a pause that a lost answer left behind, where the weights are whole.
        """
        held = self._held
        if held is None and not self._written:  # nothing of ours
            return False
        lost = (
            held is None or self._ask(self._engine.label) != held.label
        )  # None: torn, by a `heal` that failed
        if lost:
            step = self._present()
            if step is None:
                return False
            _log.warning("engine.weights_lost", engine=self.name, label=step.label)
            self._load(step)
            self._written = False
        self._ask(self._engine.resume)
        if lost:
            self._settle()
        return lost

    def serving(self) -> Serving | None:
        """By the folder's book, where the engine agrees: its label, its fingerprint where there is one, and no note."""
        serving = self._folder.serving()
        seen = self._read_known()
        if serving is None or seen is None or self._note.exists():
            return None
        if seen.state_digest != serving.state_digest or seen.label != version_label(serving.version):
            return None
        if self._ask(self._engine.label) != seen.label:
            return None
        if self._proof == "fingerprint" and self._ask(self._engine.fingerprint) != seen.fingerprint:
            return None
        self._held = seen
        return serving

    def reread(self) -> State:
        """From the folder. Raises `TargetFailed`."""
        return self._folder.reread()

    def stage(self, update: Update) -> None:
        self._before = self._present()
        if missing := sorted(self._names.difference(update.state)):
            raise StateMismatch(
                f"version {update.event.version} lacks {len(missing)} tensors that {self.name} was started with, first "
                f"{missing[0]!r}: it would keep the old ones and say nothing"
            )
        self._folder.stage(update)
        staged = self._folder.staged
        if staged is None:
            raise TargetFailed(f"the folder of version {update.event.version} is not there")
        self._staged = _Step(staged, version_label(update.event.version), update.event.state_digest)

    def swap(self) -> float:
        staged = self._staged
        if staged is None:
            raise TargetFailed("nothing is staged")
        started = time.perf_counter()
        self._load(staged)
        self._folder.swap()
        self._ask(self._engine.resume)
        pause_ms = (time.perf_counter() - started) * 1e3
        self._settle()
        return pause_ms

    def read_back(self, samples: Sequence[Sample]) -> list[NDArray[Any]] | None:
        """None: an engine holds its weights in a layout of its own."""
        return None

    def keep(self) -> None:
        self._staged = self._before = None
        self._written = False
        self._folder.keep()

    def undo(self) -> None:
        before, written = self._before, self._written
        if self._staged is None and not written:
            return
        if written:
            if before is None:
                raise TargetFailed(
                    f"{self.name} is torn, and the folder that it was started with is not known (`first`): it stays paused "
                    "until a version is loaded"
                )
            self._load(before)
        self._folder.undo()
        self._ask(self._engine.resume)
        self._settle()
        self._staged = self._before = None
        self._written = False

    def close(self) -> None:
        """Idempotent."""
        if not self._closed:
            self._closed = True
            self._engine.close()
            self._folder.close()

    @property
    def _note(self) -> Path:
        return self._root / NOTE

    def _present(self) -> _Step | None:
        """What `undo` goes back to; None = not known."""
        serving = self._folder.serving()
        if serving is not None:
            folder = self._folder.current.resolve()
            return _Step(folder, version_label(serving.version), serving.state_digest)
        if self._first is not None:
            return _Step(self._first, self._ask(self._engine.label), "")
        return None

    def _load(self, step: _Step) -> None:
        """The engine is paused at the end, with these weights. Raises `TargetFailed`."""
        earlier = self._held
        self._write_note(step)
        self._ask(self._engine.pause)
        self._written = True
        self._held = None
        self._ask(lambda: self._engine.load(self._path_there(step.folder), step.label))
        label = self._ask(self._engine.label)
        if label != step.label:
            raise TargetFailed(f"{self.name} calls its weights {label!r} after loading {step.label!r}")
        print_ = self._prove(step, earlier) if self._proof == "fingerprint" else ""
        self._held = Loaded(step.label, step.state_digest, print_)

    def _prove(self, step: _Step, earlier: Loaded | None) -> str:
        found = self._ask(self._engine.fingerprint)
        known = self._known.get(step.state_digest) if step.state_digest else None
        if known is not None and known != found:
            raise TargetFailed(
                f"{self.name} holds other weights for {step.label!r} than when it served them before"
            )
        if earlier is not None and earlier.fingerprint == found and earlier.state_digest != step.state_digest:
            raise TargetFailed(
                f"{self.name} says that it loaded {step.label!r}; its weights are those of {earlier.label!r}"
            )
        if step.state_digest:
            self._known[step.state_digest] = found
        return found

    def _settle(self) -> None:
        """The engine serves whole weights again: what it holds is written down, and the note goes."""
        try:
            if self._held is not None:
                beside = self._root / f"{KNOWN}.partial"
                beside.write_bytes(msgspec.json.encode(self._held))
                beside.replace(self._root / KNOWN)
            self._note.unlink(missing_ok=True)
        except OSError as error:  # the next start loads a version more than it had to
            _log.warning("engine.note_kept", root=str(self._root), error=str(error))

    def _write_note(self, step: _Step) -> None:
        try:
            with self._note.open("w") as file:
                file.write(f"{step.label} {step.folder}\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise TargetFailed(f"{self._note}: {error}") from error

    def _read_known(self) -> Loaded | None:
        try:
            return msgspec.json.decode((self._root / KNOWN).read_bytes(), type=Loaded)
        except (OSError, msgspec.MsgspecError):
            return None

    def _path_there(self, folder: Path) -> Path:
        if self._seen_at is None or not folder.is_relative_to(self._root):
            return folder.absolute()
        return self._seen_at / folder.relative_to(self._root)

    def _ask(self, call: Callable[[], Answer]) -> Answer:
        try:
            return call()
        except EngineError as error:
            raise TargetFailed(f"{self.name}: {error}") from error
