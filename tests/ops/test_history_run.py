"""A prefix that nothing has is a mistake of whoever named it, and no clean history."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest

from rollwire.ops.broker import Broker
from rollwire.ops.history import History
from rollwire.schemas.errors import ConfigError
from rollwire.streams.archive.heads import LocalSigner, new_signing_key
from rollwire.streams.archive.log import ArchivedLog
from rollwire.streams.archive.run_archive import archive_round
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.log import Outgoing
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.store_memory import MemoryStore


def test_a_run_is_there_as_long_as_log_or_archive_has_anything_of_it() -> None:
    clock = ManualClock()
    store, at = MemoryStore(clock), Broker("nowhere:1", "run.")
    empty, full = MemoryLog({}, clock), MemoryLog({"rewards": 1}, clock)

    def demand(live: MemoryLog) -> None:
        with closing(ArchivedLog(live, store, at.name)) as log:
            History(log, live, store, at).demand_run()

    with pytest.raises(ConfigError, match=r"prefix 'run\.'"):
        demand(empty)
    demand(full)
    full.writer().write([Outgoing("rewards", None, b"1", (), 0)])
    archive_round(
        full,
        store,
        LocalSigner(new_signing_key()),
        name="run",
        clock=clock,
        stop=threading.Event(),
    )
    demand(empty)  # the topics were deleted, the archive was not
