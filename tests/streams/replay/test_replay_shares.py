"""Partitions shared out among processes: one order, and whatever ends a worker is told."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from rollwire.schemas.errors import AuditError
from rollwire.streams.replay.shares import shared

# A module that a worker's process can import.
JOBS: Final = """
import os
from contextlib import contextmanager
from rollwire.schemas.errors import ConfigError
from rollwire.streams.replay.shares import Logs
from rollwire.streams.replay.window import Made
from rollwire.streams.seams.log import Outgoing
from rollwire.streams.seams.log_memory import MemoryLog

@contextmanager
def nothing():
    yield Logs(MemoryLog({}), MemoryLog({}))

def job(number, step_us, count, logs):
    for i in range(count):
        yield Made(i * step_us, Outgoing("groups", f"{number}/{i}".encode(), None))

def failing(logs):
    yield Made(0, Outgoing("groups", b"first", None))
    raise ConfigError("a wrong setting")

def dying(logs):
    yield Made(0, Outgoing("groups", b"first", None))
    os._exit(3)
"""


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "jobs_of_a_replay.py").write_text(JOBS, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "jobs_of_a_replay", raising=False)
    return importlib.import_module("jobs_of_a_replay")


def test_workers_give_the_order_of_one_though_jobs_differ_in_length(jobs: Any) -> None:
    # One is over before the others' second batch: a worker that waits for room there must not hold up the rest.
    sizes = [(1, 9_000), (900, 10), (7, 5_000)]
    made = [partial(jobs.job, number, step, count) for number, (step, count) in enumerate(sizes)]
    alone = list(shared(made, jobs.nothing, 1))
    assert list(shared(made, jobs.nothing, 2)) == alone
    assert [one.at_us for one in alone] == sorted(one.at_us for one in alone)
    assert len(alone) == 14_010


@pytest.mark.parametrize(("name", "why"), [("failing", "a wrong setting"), ("dying", "code 3")])
def test_what_ends_a_worker_is_told(jobs: Any, name: str, why: str) -> None:
    with pytest.raises(AuditError, match=why):
        list(shared([getattr(jobs, name), partial(jobs.job, 0, 1, 10)], jobs.nothing, 2))
