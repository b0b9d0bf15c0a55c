"""`audit export` as a side of the bench: a lake in a folder, made anew each time."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from rollwire.ops.bench.replay.load import TOPIC, Source
from rollwire.schemas.errors import EnvironmentMissing, LogError
from rollwire.streams.seams.store_folder import FolderStore


def exported(source: Source) -> float:
    """Seconds from the first plan to the last manifest. Raises `LogError` where a row is missing."""
    return _lake(source, check=False)


def check_export(source: Source) -> None:
    """Raises `LogError` where the lake of a source, row by row, is not the topic."""
    _lake(source, check=True)


def _lake(source: Source, *, check: bool) -> float:
    try:
        from rollwire.consumers.audit import lake_check, lake_export
    except ModuleNotFoundError as error:
        raise EnvironmentMissing(
            f"{error.name} is not installed; install the extra: pip install 'rollwire[lake]'"
        ) from error
    name = source.prefix.rstrip(".")
    with tempfile.TemporaryDirectory(prefix="rollwire-lake-") as folder:
        store = FolderStore(Path(folder))
        store.ensure_bucket()
        began = time.perf_counter()
        made = lake_export.export(source.log(), store, name=name, topics=(TOPIC,))
        took = time.perf_counter() - began
        if made.findings or made.rows != source.records:
            raise LogError(f"of {source.records:,} records {made.rows:,} were exported: {made.findings[:3]}")
        if check and (wrong := lake_check.check(source.log(), store, name=name).findings):
            raise LogError(f"the lake is not the topic: {wrong[:3]}")
    return took
