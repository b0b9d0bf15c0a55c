"""`audit export` as a side of the bench: a lake in a folder, made anew each time."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rollwire.ops.bench.replay.load import TOPIC, Source
from rollwire.ops.lake.places import cores
from rollwire.ops.memory import tune_memory
from rollwire.schemas.errors import EnvironmentMissing, LogError
from rollwire.streams.seams.store_folder import FolderStore

if TYPE_CHECKING:
    from rollwire.consumers.audit.lake_share import Past


def exported(source: Source) -> float:
    """Seconds from the first plan to the last manifest, with the start of the processes that share it. Raises `LogError` where a row is missing."""
    return _lake(source, check=False)


def check_export(source: Source) -> None:
    """Raises `LogError` where the lake of a source, row by row, is not the topic."""
    _lake(source, check=True)


@contextmanager
def _opened(source: Source, store: FolderStore) -> Iterator[Past]:
    """In another process of an export."""
    from rollwire.consumers.audit.lake_share import Past

    tune_memory()
    with closing(source.log()) as log:
        yield Past(log, store)


def _lake(source: Source, *, check: bool) -> float:
    try:
        from rollwire.consumers.audit import lake_check, lake_export, lake_share
    except ModuleNotFoundError as error:
        raise EnvironmentMissing(
            f"{error.name} is not installed; install the extra: pip install 'rollwire[lake]'"
        ) from error
    name = source.prefix.rstrip(".")
    with tempfile.TemporaryDirectory(prefix="rollwire-lake-") as folder:
        store = FolderStore(Path(folder))
        store.ensure_bucket()
        share = lake_share.Share(cores(), partial(_opened, source, store))
        began = time.perf_counter()
        made = lake_export.export(source.log(), store, name=name, topics=(TOPIC,), share=share)
        took = time.perf_counter() - began
        if made.findings or made.rows != source.records:
            raise LogError(f"of {source.records:,} records {made.rows:,} were exported: {made.findings[:3]}")
        if check and (wrong := lake_check.check(source.log(), store, name=name).findings):
            raise LogError(f"the lake is not the topic: {wrong[:3]}")
    return took
