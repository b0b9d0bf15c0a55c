"""A folder of safetensors that always names one whole version, whatever dies when.

    <root>/current                 a link to the version that serves; replaced by one rename
    <root>/versions/<name>/        model*.safetensors, index, rollwire.json, whatever else an engine needs
    <root>/.staging-*              unfinished; removed at the next start

A version's files are written and synced beside, the folder is renamed into place when it is whole, and the link is replaced
last. A reader opens `<root>/current`, resolves the link once and finds the files of one version; the version before stays
until the next one is kept.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from rollwire.consumers.weights.anchor import AnchorFile, read_anchor, write_anchor
from rollwire.consumers.weights.targets.target import Sample, Serving, Update
from rollwire.kernels.tensors import State, lane_dtype
from rollwire.schemas.errors import ConfigError, DeltaCorrupt, StateMismatch, TargetFailed
from rollwire.schemas.records import WeightVersion

BOOK: Final = "rollwire.json"
CURRENT: Final = "current"
_STAGING: Final = ".staging-"
_WEIGHTS: Final = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth")
_log = structlog.get_logger()


class Book(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which version a folder holds."""

    model: str
    lineage: str
    version: int
    state_digest: str


class FolderTarget:
    """Implements `Target` and `Rereadable`. One process at a time may hold a root.

    `extra`: a folder whose files (tokenizer, config.json, ...) are put beside each version's weights;
    weights that it holds itself, such as those the engine was started with, are left out.
    """

    def __init__(self, root: Path, *, extra: Path | None = None, shard_bytes: int = 5_000_000_000) -> None:
        """Raises `ConfigError` where another process holds the root or `extra` is no folder."""
        self._root = root
        self._versions = root / "versions"
        self._extra = extra
        self._shard_bytes = shard_bytes
        if extra is not None and not extra.is_dir():
            raise ConfigError(f"{extra} is no folder: it should hold the files that go beside the weights")
        self._versions.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(root / ".lock")
        self._written: set[Path] = set()  # by this process: whole, and what they say
        self._staged: Path | None = None
        self._before: Path | None = None
        self._swapped = False
        self._clean({self._linked()})

    @property
    def name(self) -> str:
        return "folder"

    @property
    def current(self) -> Path:
        """What a reader opens."""
        return self._root / CURRENT

    @property
    def staged(self) -> Path | None:
        """The folder of the version that is staged, whole; None = nothing is."""
        return self._staged

    @property
    def linked(self) -> Path | None:
        """The folder of the version that serves; None = none does."""
        return self._linked()

    def held(self) -> State | None:
        return None

    def serving(self) -> Serving | None:
        linked = self._linked()
        book = None if linked is None else _book(linked)
        return None if book is None else Serving(book.lineage, book.version, book.state_digest)

    def reread(self) -> State:
        """The served state, whole. Raises `TargetFailed` where it can't be read."""
        linked = self._linked()
        if linked is None:
            raise TargetFailed(f"{self.current} leads nowhere")
        try:
            return read_anchor(
                [AnchorFile(f.name, f.read_bytes()) for f in sorted(linked.glob("*.safetensors"))]
            )
        except (OSError, DeltaCorrupt) as error:
            raise TargetFailed(f"{linked} can't be read: {error}") from error

    def stage(self, update: Update) -> None:
        self._before, self._swapped = self._linked(), False
        event = update.event
        parts = sorted(name for name, one in update.state.items() if not one.whole)
        if parts:
            raise StateMismatch(f"{parts[0]!r} is held in part: a folder holds whole tensors")
        folder = self._versions / f"{event.version:08d}-{event.state_digest[:12]}-{event.lineage[:8]}"
        try:
            if folder not in self._written:
                if folder.exists():  # of another life: perhaps it serves, and what is in it is not known
                    folder = folder.with_name(f"{folder.name}-{uuid.uuid4().hex[:6]}")
                self._write(folder, event, update.state)
                self._written.add(folder)
        except OSError as error:
            raise TargetFailed(f"version {event.version} was not written to {folder}: {error}") from error
        self._staged = folder

    def swap(self) -> float:
        if self._staged is None:
            raise TargetFailed("nothing is staged")
        started = time.perf_counter()
        self._swapped = True
        self._link(self._staged)
        return (time.perf_counter() - started) * 1e3

    def read_back(self, samples: Sequence[Sample]) -> list[NDArray[Any]] | None:
        linked = self._linked()
        if linked is None:
            raise TargetFailed(f"{self.current} leads nowhere")
        try:
            places = _places(linked)
            return [_read(places, sample) for sample in samples]
        except (OSError, ValueError, KeyError) as error:
            raise TargetFailed(f"{linked} can't be read back: {type(error).__name__}: {error}") from error

    def keep(self) -> None:
        kept = {self._staged, self._before}
        self._staged, self._before, self._swapped = None, None, False
        self._clean({*kept, self._linked()})

    def undo(self) -> None:
        staged, self._staged = self._staged, None
        before, self._before = self._before, None
        swapped, self._swapped = self._swapped, False
        if swapped:
            self._link(before)
        if staged is not None and staged != before:
            self._clean({*self._versions.iterdir()} - {staged})

    def close(self) -> None:
        os.close(self._lock)

    def _linked(self) -> Path | None:
        try:
            folder = self._root / os.readlink(self.current)
        except OSError:
            return None
        return folder if folder.is_dir() else None

    def _write(self, folder: Path, event: WeightVersion, state: State) -> None:
        fresh = self._root / f"{_STAGING}{uuid.uuid4().hex}"
        fresh.mkdir()
        for file in () if self._extra is None else sorted(self._extra.iterdir()):
            if file.is_file() and not file.name.endswith(_WEIGHTS):
                _put(fresh / file.name, file.read_bytes())
        for name, data in write_anchor(state, shard_bytes=self._shard_bytes):
            _put(fresh / name, data)
        _put(fresh / BOOK, msgspec.json.encode(_book_of(event)))
        _sync_folder(fresh)
        fresh.rename(folder)
        _sync_folder(self._versions)

    def _link(self, folder: Path | None) -> None:
        try:
            if folder is None:
                self.current.unlink(missing_ok=True)
            else:
                link = self._root / f"{_STAGING}{uuid.uuid4().hex}"
                link.symlink_to(folder.relative_to(self._root))
                link.replace(self.current)
            _sync_folder(self._root)
        except OSError as error:
            raise TargetFailed(f"{self.current} was not led to {folder}: {error}") from error

    def _clean(self, kept: AbstractSet[Path | None]) -> None:
        """Removes what nobody is led to, but `kept`. What can't be removed now is tried again at the next version."""
        for path in (*self._root.glob(f"{_STAGING}*"), *self._versions.iterdir()):
            if path in kept:
                continue
            self._written.discard(path)
            try:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            except OSError as error:
                _log.warning("weights.folder_not_removed", path=str(path), error=str(error))


def _book_of(event: WeightVersion) -> Book:
    return Book(event.model, event.lineage, event.version, event.state_digest)


def _book(folder: Path) -> Book | None:
    """None where there is none, or none of ours: then the folder is written anew."""
    try:
        return msgspec.json.decode((folder / BOOK).read_bytes(), type=Book)
    except (OSError, msgspec.MsgspecError):
        return None


def _lock(path: Path) -> int:
    """Held until the process ends, however it ends."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise ConfigError(f"{path.parent} is held by another process: a folder has one follower") from error
    return handle


def _put(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _Place(msgspec.Struct, frozen=True):
    file: Path
    dtype: str
    at: int  # bytes from the start of the file


def _places(folder: Path) -> dict[str, _Place]:
    """Where each tensor's bytes are: a safetensors file is the size of its header (8 bytes), the header, the data."""
    found: dict[str, _Place] = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(size))
        for name, entry in header.items():
            if name != "__metadata__":
                found[name] = _Place(path, entry["dtype"], 8 + size + entry["data_offsets"][0])
    return found


def _read(places: dict[str, _Place], sample: Sample) -> NDArray[Any]:
    place = places[sample.name]
    lane = lane_dtype(place.dtype)
    with place.file.open("rb") as file:
        file.seek(place.at + sample.start * lane.itemsize)
        return np.frombuffer(file.read((sample.end - sample.start) * lane.itemsize), lane)
