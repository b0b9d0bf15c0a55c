"""The whole history of a run, as audits open it: the log, behind it the archive, and the store that both speak of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from rollwire.ops.broker import Broker, broker, run_bucket
from rollwire.ops.stack import read_stack
from rollwire.ops.stores import bucket_store, stack_store
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import ConfigError, ObjectMissing, StackError, StoreUnavailable
from rollwire.streams.archive.layout import archived_folder
from rollwire.streams.archive.log import ArchivedLog
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.places import existing
from rollwire.streams.seams.store import ObjectStore

_LOOK_S: Final = 5.0
_logger = structlog.get_logger("rollwire.history")


class History(NamedTuple):
    log: Log  # reads across archive and log as one
    live: Log  # the broker alone
    store: ObjectStore  # weights, claims, archive and heads
    at: Broker

    @property
    def name(self) -> str:
        """Of the run whose topics these are: their prefix without its last dot."""
        return self.at.name

    def demand_run(self) -> None:
        """Raises `ConfigError` where neither log nor archive has any topic of the run: nothing there is no clean history."""
        if not existing(self.log, TOPICS):
            raise ConfigError(
                f"neither the broker nor the archive has a topic with the prefix {self.at.prefix!r}: name the run's by --prefix"
            )


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
    Raises `StackError` where no broker or store is recorded, `ConfigError` where there is no such bucket as `bucket`."""
    at = broker(dir, bootstrap, prefix, schema_registry)
    store = bucket_store(dir, bucket or run_bucket(dir, at.prefix))
    if bucket is not None:
        try:
            next(iter(store.list(archived_folder(at.name))), None)
        except ObjectMissing as error:  # else its archive would be taken for one that holds nothing
            raise ConfigError(f"there is no bucket {bucket!r}: {error}") from error
    with at.log(command) as live, closing(ArchivedLog(live, store, at.name)) as log:
        yield History(log, live, store, at)


@contextmanager
def open_reading(
    command: str,
    *,
    dir: Path,
    bootstrap: str | None = None,
    prefix: str | None = None,
    schema_registry: str | None = None,
    bucket: str | None = None,
) -> Iterator[Log]:
    """For commands that look at the log: across the archive where the run has one. Without one, or with a store that is not
    there or not up, it is the live log: whoever looks does not need the store."""
    at = broker(dir, bootstrap, prefix, schema_registry)
    with at.log(command) as live, ExitStack() as opened:
        log: Log = live
        try:
            store = stack_store(read_stack(dir), bucket or run_bucket(dir, at.prefix), timeout_s=_LOOK_S)
            if any(True for _ in store.list(archived_folder(at.name))):
                log = opened.enter_context(closing(ArchivedLog(live, store, at.name)))
        except (StackError, ObjectMissing):
            pass  # no store is known here, or no bucket: nothing is archived
        except StoreUnavailable as error:
            _logger.warning("history.log_only", command=command, why=str(error))
        yield log
