"""Where a lake is, and how processes that share an export open it and the history."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rollwire.ops.history import open_history
from rollwire.ops.memory import tune_memory
from rollwire.ops.stores import bucket_store
from rollwire.schemas.errors import ConfigError
from rollwire.streams.seams.store import ObjectStore
from rollwire.streams.seams.store_folder import FolderStore

if TYPE_CHECKING:
    from rollwire.consumers.audit.lake_share import Past

_S3: Final = "s3://"
_MOST: Final = 4


@dataclass(frozen=True, slots=True)
class LivePast:
    """Opens a history and the lake made of it, in whatever process it is called in."""

    to: str
    dir: Path
    bootstrap: str | None
    prefix: str | None
    schema_registry: str | None
    bucket: str | None

    @contextmanager
    def __call__(self) -> Iterator[Past]:
        # Not at the top: it needs an extra.
        from rollwire.consumers.audit.lake_share import Past

        tune_memory()
        store, _ = lake_at(self.to, self.dir)
        with open_history(
            "audit-export",
            dir=self.dir,
            bootstrap=self.bootstrap,
            prefix=self.prefix,
            schema_registry=self.schema_registry,
            bucket=self.bucket,
        ) as past:
            yield Past(past.log, store)


def cores() -> int:
    """Processes that an export is shared among: the cores that this one may use, four at most."""
    return min(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, _MOST
    )


def lake_at(to: str, dir: Path) -> tuple[ObjectStore, str]:
    """The store of a lake, and what stands before its keys. Raises `ConfigError`, `StackError`."""
    if not to.startswith(_S3):
        folder = FolderStore(Path(to))
        folder.ensure_bucket()
        return folder, ""
    bucket, _, before = to.removeprefix(_S3).partition("/")
    if not bucket:
        raise ConfigError(f"--to {to}: say s3://bucket/prefix")
    before = before.strip("/")
    if not before:
        raise ConfigError(
            f"--to {to}: say a prefix too, as in s3://{bucket}/lake: a bucket may hold other things"
        )
    store = bucket_store(dir, bucket)
    store.ensure_bucket()
    return store, before + "/"
