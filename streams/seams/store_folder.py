"""The object store in a folder of this machine: for what people want as files. It passes the behavioural suite of the seam.

An object is written beside its place, flushed, and linked there: a link fails where something is, so that of several creators
one wins and nobody sees a half. Keys are relative paths; names that begin with `.part-` are what a killed writer left.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from rollwire.schemas.errors import ObjectConflict, ObjectMissing, StoreUnavailable, StoreUnfit
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.store import ObjectInfo
from rollwire.streams.seams.store_memory import REFRESH_US, check_range, verify

_PART: Final = ".part-"


class FolderStore:
    """One folder as a bucket; it is made when the first object is. Thread-safe, and safe among processes."""

    def __init__(self, folder: Path, clock: Clock | None = None) -> None:
        self.folder = folder
        self._clock: Clock = clock if clock is not None else SystemClock()

    def create(self, key: str, data: bytes) -> bool:
        place = self._place(key)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            part = place.parent / f"{_PART}{secrets.token_hex(8)}"
            try:
                with part.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.link(part, place)
            finally:
                part.unlink(missing_ok=True)
            _flush_names(place.parent)
        except FileExistsError:
            return self._there(key, place, data)
        except OSError as error:
            raise StoreUnavailable(f"{place}: {error}; is the disk full, or the folder not yours?") from error
        return True

    def get(self, key: str, *, sha256: str | None = None) -> bytes:
        data = self._read(key)
        verify(key, data, sha256)
        return data

    def get_range(self, key: str, start: int, end: int) -> bytes:
        check_range(key, start, end)
        try:
            with self._place(key).open("rb") as file:
                file.seek(start)
                return file.read(end - start)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise ObjectMissing(f"{key!r} does not exist in {self.folder}") from error
        except OSError as error:
            raise StoreUnavailable(f"{key!r} in {self.folder}: {error}") from error

    def head(self, key: str) -> ObjectInfo | None:
        place = self._place(key)
        return _info(key, place) if place.is_file() else None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        # Only folders that can hold such keys are walked.
        start = self.folder / PurePosixPath(prefix).parent if "/" in prefix else self.folder
        if prefix.endswith("/"):
            start = self.folder / prefix
        found: list[str] = []
        for at, _, names in os.walk(start):
            root = Path(at).relative_to(self.folder)
            found += [(root / name).as_posix() for name in names if not name.startswith(_PART)]
        for key in sorted(key for key in found if key.startswith(prefix)):
            info = _info(key, self.folder / key)
            if info is not None:
                yield info

    def delete(self, key: str) -> None:
        place = self._place(key)
        try:
            place.unlink(missing_ok=True)
        except NotADirectoryError:
            return
        except OSError as error:
            raise StoreUnavailable(f"{place}: {error}") from error

    def purge(self, key: str) -> None:
        """There are no older versions here."""
        self.delete(key)

    def probe(self) -> None:
        key = f"probe-{secrets.token_hex(8)}"
        try:
            self.create(key, b"a")
            try:
                self.create(key, b"b")
            except ObjectConflict:
                return
            raise StoreUnfit(f"{self.folder}: a second creator of one file was not refused")
        finally:
            self.delete(key)

    def ensure_bucket(self) -> None:
        """Makes the folder."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreUnavailable(f"{self.folder}: {error}") from error

    def _there(self, key: str, place: Path, data: bytes) -> bool:
        """False where `key` has this content; its time is set anew where it is old (law 3)."""
        if self._read(key) != data:
            raise ObjectConflict(f"{key!r} exists with other content in {self.folder}")
        now_us = self._clock.now_us()
        if now_us - place.stat().st_mtime_ns // 1_000 > REFRESH_US:
            os.utime(place, ns=(now_us * 1_000, now_us * 1_000))
        return False

    def _read(self, key: str) -> bytes:
        try:
            return self._place(key).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise ObjectMissing(f"{key!r} does not exist in {self.folder}") from error
        except OSError as error:
            raise StoreUnavailable(f"{key!r} in {self.folder}: {error}") from error

    def _place(self, key: str) -> Path:
        path = PurePosixPath(key)
        if not key or path.is_absolute() or ".." in path.parts or str(path) != key:
            raise ValueError(f"{key!r} is no key of an object")
        return self.folder / path


def _info(key: str, place: Path) -> ObjectInfo | None:
    try:
        found = place.stat()
    except FileNotFoundError:
        return None
    return ObjectInfo(key, found.st_size, found.st_mtime_ns // 1_000)


def _flush_names(folder: Path) -> None:
    """A new name is durable once its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
