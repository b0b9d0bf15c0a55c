"""The whole history of a run, as audits open it: the log, behind it the archive, and the store that both speak of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from rollwire.ops.broker import Broker, broker, run_bucket
from rollwire.ops.stores import bucket_store
from rollwire.streams.archive.log import ArchivedLog
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.store import ObjectStore


class History(NamedTuple):
    log: Log  # reads across archive and log as one
    live: Log  # the broker alone
    store: ObjectStore  # weights, claims, archive and heads
    at: Broker

    @property
    def name(self) -> str:
        """Of the run whose topics these are: their prefix without its last dot."""
        return self.at.prefix.rstrip(".")


@contextmanager
def open_history(
    command: str,
    *,
    dir: Path,
    bootstrap: str | None = None,
    prefix: str | None = None,
    schema_registry: str | None = None,
    bucket: str | None = None,
) -> Iterator[History]:
    """Open until the `with` ends. `bucket`: by default that of the newest run with the prefix, without one the stack's.
    Raises `StackError` where no broker or store is recorded."""
    at = broker(dir, bootstrap, prefix, schema_registry)
    store = bucket_store(dir, bucket or run_bucket(dir, at.prefix))
    with at.log(command) as live, closing(ArchivedLog(live, store, at.prefix.rstrip("."))) as log:
        yield History(log, live, store, at)
