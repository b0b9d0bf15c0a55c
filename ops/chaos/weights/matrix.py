"""The cells of the matrix: deaths of who publishes or of who follows, the lives after them, and what must hold.

After each death what anybody can see is whole and right, or nothing of it is there; the next life, which is told nothing,
brings the run to its end; and what is served then is the last version, bit by bit.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import msgspec

from rollwire.consumers.weights.publisher import SnapshotPublisher
from rollwire.ops.chaos.weights.collector import judge_clean, judge_collected
from rollwire.ops.chaos.weights.effects import FOLDER, SIDES, Crash
from rollwire.ops.chaos.weights.judge import (
    LOOK_S,
    CellFailed,
    Reports,
    died_there,
    end_of,
    ended_well,
    judge_folder,
    judge_status,
    judge_versions,
)
from rollwire.ops.chaos.weights.lives import Lives, MemoryLives, Role, Task
from rollwire.ops.chaos.weights.roles import WAIT_S, Coder
from rollwire.ops.chaos.weights.states import LAST, PUBLISHER, model_of, state_of
from rollwire.ops.chaos.weights.targets import Failure
from rollwire.schemas.records import WeightVersion
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.log import Log, Writer
from rollwire.streams.seams.store import ObjectStore


class Bench(NamedTuple):
    """Where cells are run. Log and store are the plain ones; the lives see them with their deaths in between."""

    lives: Lives
    log: Log
    store: ObjectStore


class Result(NamedTuple):
    """One cell. `problem` is empty where everything held."""

    part: str
    cell: str
    seconds: float
    problem: str


def crashes(seen: Mapping[str, int]) -> list[Crash]:
    """Both sides of every effect that a life had; after a change in a folder is before the next one."""
    return [
        Crash(name, hit, side)
        for name, times in seen.items()
        for hit in range(1, times + 1)
        for side in (SIDES[:1] if name.startswith(FOLDER) else SIDES)
    ]


def publisher_cell(
    bench: Bench,
    crash: Crash | None,
    *,
    first: Crash | None = None,
    kill_s: float | None = None,
    coder: Coder = "gap",
) -> dict[str, int]:
    """Who publishes dies there, and where `first` is given, there before, so that it dies as it goes on. A replica follows
    all the while and compares whatever it serves. `kill_s`: it is killed so many seconds after its start.

    Returns the effects of the life that did not die. Raises `CellFailed`.
    """
    lineage = new_lineage()
    watcher = MemoryLives(bench.log, bench.store).start(Task("follow", lineage, LAST))
    deaths = [death for death in (first, crash) if death is not None]
    try:
        while True:
            death = deaths.pop(0) if deaths else None
            life = bench.lives.start(Task("publish", lineage, LAST, death, coder=coder))
            if kill_s is not None and life.ended(kill_s) is None:
                life.kill()
            end = end_of(life, "who publishes")
            if death is not None:
                died_there(end, death)
            elif kill_s is None or not end.died:
                break
            kill_s = None
            judge_versions(bench.log, bench.store, lineage, complete=False)
        ended_well(end, "who publishes")
        judge_versions(bench.log, bench.store, lineage, complete=True)
        ended_well(end_of(watcher, "the replica beside it"), "the replica beside it")
    finally:
        watcher.kill()
    return dict(end.seen)


def replica_cell(
    bench: Bench,
    crash: Crash | None,
    role: Role = "follow",
    *,
    first: Crash | None = None,
    folder: Path | None = None,
    failure: Failure | None = None,
    kill_s: float | None = None,
) -> dict[str, int]:
    """Who follows dies there. Each version is committed when the one before it is said to be served, so that the path is
    always the same. `failure`: its target fails once, nobody dies. The rest as `publisher_cell`.
    """
    lineage = new_lineage()
    events = stored(bench.store, lineage)
    writer, reports = bench.log.writer(), Reports(bench.log, lineage)
    deaths = [death for death in (first, crash) if death is not None]
    task = Task(role, lineage, LAST, None, "" if folder is None else str(folder), failure)
    death = deaths.pop(0) if deaths else None
    commit_event(writer, events[0])
    life = bench.lives.start(msgspec.structs.replace(task, crash=death))
    fed, began = 0, time.monotonic()
    try:
        while True:
            alive_s = time.monotonic() - began
            if kill_s is not None and alive_s >= kill_s:
                life.kill()
            for status in reports.poll(LOOK_S if kill_s is None else max(0.0, min(LOOK_S, kill_s - alive_s))):
                judge_status(status, "" if failure is None else "Failed")
                if fed < LAST and reports.settled(fed):
                    fed += 1
                    commit_event(writer, events[fed])
            end = life.ended()
            if end is None:
                if alive_s > WAIT_S:
                    raise CellFailed(f"version {fed} was not served within {WAIT_S:g} s")
                continue
            if death is not None:
                died_there(end, death)
            elif kill_s is None or not end.died:
                break
            kill_s = None
            judge_folder(folder, reports)
            death = deaths.pop(0) if deaths else None
            life = bench.lives.start(msgspec.structs.replace(task, crash=death))
        ended_well(end, "who follows")
        reports.drain()
        judge_folder(folder, reports)
        last = [status.state for status in reports.all][-2:]
        if last != ["swapped", "stopped"] or reports.all[-1].version != LAST:
            raise CellFailed(f"the last reports are {last} of version {reports.all[-1].version}")
        if failure is not None and "refused" not in {status.state for status in reports.all}:
            raise CellFailed("nothing was refused, though the target failed")
        return dict(end.seen)
    finally:
        life.kill()
        reports.close()
        writer.close()


def collector_cell(
    fresh: Callable[[], AbstractContextManager[Bench]], _: Bench, crash: Crash | None
) -> dict[str, int]:
    """Who deletes dies there, and the next run deletes the rest. `fresh` gives a log and a bucket of its own."""
    lineage = new_lineage()
    with fresh() as bench:
        publisher = MemoryLives(bench.log, bench.store).start(Task("publish", lineage, LAST))
        ended_well(end_of(publisher, "who publishes"), "who publishes")
        if crash is not None:
            died_there(
                end_of(bench.lives.start(Task("collect", lineage, LAST, crash)), "the collector"), crash
            )
            judge_collected(bench.log, bench.store, lineage)
        end = end_of(bench.lives.start(Task("collect", lineage, LAST)), "the collector")
        ended_well(end, "the collector")
        judge_collected(bench.log, bench.store, lineage)
        judge_clean(bench.log, bench.store)
    return dict(end.seen)


def stored(store: ObjectStore, lineage: str) -> list[WeightVersion]:
    """All versions in the store, none of them committed."""
    publisher = SnapshotPublisher(store, model=model_of(lineage), lineage=lineage, config=PUBLISHER)
    try:
        events = []
        for version in range(LAST + 1):
            events.append(publisher.submit(version, version, state_of(version)).result(WAIT_S))
            publisher.committed(version)
        return events
    finally:
        publisher.close(WAIT_S)


def commit_event(writer: Writer, event: WeightVersion) -> None:
    writer.write([outgoing(event, source="rollwire/chaos", time_us=event.published_us)])


def new_lineage() -> str:
    return str(uuid.uuid4())


def judged(part: str, name: str, cell: Callable[[], object]) -> Result:
    """One cell, judged. What is no error of ours, a timeout below say, is a finding too."""
    began, problem = time.monotonic(), ""
    try:
        cell()
    except CellFailed as failed:
        problem = str(failed)
    except Exception as error:  # noqa: BLE001  # a cell must not end the matrix
        problem = f"{type(error).__name__}: {error}"
    return Result(part, name, time.monotonic() - began, problem)
