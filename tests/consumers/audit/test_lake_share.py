"""A lake that several processes write: the one that a single process writes, and whatever ends one of them is told."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from rollwire.consumers.audit import lake_share
from rollwire.consumers.audit.lake_check import check
from rollwire.consumers.audit.lake_export import Exported, export
from rollwire.consumers.audit.lake_share import Share
from rollwire.consumers.audit.lake_stretches import Told
from rollwire.schemas.errors import AuditError, DeadlineExceeded
from rollwire.streams.seams.store_folder import FolderStore

# A module that a worker's process can import: it makes the same history in each.
PASTS: Final = """
import os
import signal
from contextlib import contextmanager
from pathlib import Path

import msgspec

from rollwire.consumers.audit.lake_share import Past
from rollwire.schemas.errors import StoreUnavailable
from rollwire.schemas.golden import load_examples
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.log import Outgoing
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.store_folder import FolderStore

def history():
    log = MemoryLog({"group-fates": 3}, ManualClock())
    event = load_examples("group-fates")[0].event
    made = outgoing(event, source="rollwire/test", time_us=1_767_225_600_000_000)
    for partition in range(3):
        records = [made._replace(partition=partition)] * (300 + partition)
        log.writer().write([*records, Outgoing("group-fates", b"k", b"no event", (), partition)])
    return log

class Marked(FolderStore):
    def create(self, key, data):
        with (self.folder.parent / f"wrote-{os.getpid()}").open("a") as out:
            out.write(key + "\\n")
        return super().create(key, data)

class Killed(FolderStore):
    def create(self, key, data):
        done = super().create(key, data)
        os.kill(os.getpid(), signal.SIGKILL)
        return done

class Broken(FolderStore):
    def create(self, key, data):
        raise StoreUnavailable("the disk is full")

@contextmanager
def opened(kind, folder):
    yield Past(history(), kind(folder))
"""


@pytest.fixture
def pasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "pasts_of_a_lake.py").write_text(PASTS, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pasts_of_a_lake", raising=False)
    monkeypatch.setattr(lake_share, "_LEAST", 100)
    return importlib.import_module("pasts_of_a_lake")


def keys(folder: Path) -> dict[str, bytes]:
    store = FolderStore(folder)
    return {info.key: store.get(info.key) for info in store.list("")}


def others(folder: Path) -> set[Path]:
    """What other processes that wrote left beside the lake."""
    return set(folder.parent.glob("wrote-*")) - {folder.parent / f"wrote-{os.getpid()}"}


def exported(
    pasts: Any, folder: Path, kind: str, until: Callable[[], bool] = lambda: True, told: Told | None = None
) -> Exported:
    """By two processes. The first one reads no further than its first records `until` something is so."""

    def wait(topic: str, records: int) -> None:
        if told is not None:
            told(topic, records)
        deadline = time.monotonic() + 60
        while threading.current_thread() is threading.main_thread() and not until():
            if time.monotonic() > deadline:
                raise DeadlineExceeded("no other process began")
            threading.Event().wait(0.02)

    return export(
        pasts.history(),
        FolderStore(folder),
        name="demo",
        topics=["group-fates"],
        told=wait,
        share=Share(2, partial(pasts.opened, getattr(pasts, kind), folder)),
    )


def test_two_processes_make_the_lake_of_one(pasts: Any, tmp_path: Path) -> None:
    alone, both = tmp_path / "alone", tmp_path / "both"
    one = export(pasts.history(), FolderStore(alone), name="demo", topics=["group-fates"])
    seen: list[int] = []
    two = exported(pasts, both, "Marked", lambda: bool(others(both)), lambda _, records: seen.append(records))
    assert two == one
    assert one.rows == sum(seen) == 906
    assert [finding.position.partition for finding in two.findings if finding.position] == [0, 1, 2]
    assert keys(both) == keys(alone)
    assert not check(pasts.history(), FolderStore(both), name="demo").findings


@pytest.mark.parametrize(("kind", "why"), [("Killed", "ended with code -9"), ("Broken", "the disk is full")])
def test_what_ends_a_process_is_told_and_the_next_export_goes_on(
    pasts: Any, tmp_path: Path, kind: str, why: str
) -> None:
    alone, both = tmp_path / "alone", tmp_path / "both"
    one = export(pasts.history(), FolderStore(alone), name="demo", topics=["group-fates"])
    with pytest.raises(AuditError, match=why):
        exported(
            pasts, both, kind, lambda: "lake-process-1" not in {one.name for one in threading.enumerate()}
        )
    again = export(pasts.history(), FolderStore(both), name="demo", topics=["group-fates"])
    assert again.rounds == one.rounds
    assert keys(both) == keys(alone)


def test_little_is_written_by_one_process(
    pasts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lake_share, "_LEAST", 1_000)
    folder = tmp_path / "lake"
    assert exported(pasts, folder, "Marked").rows == 906
    assert not others(folder)
