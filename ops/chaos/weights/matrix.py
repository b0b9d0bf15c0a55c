"""The cells of the matrix: one death each, of who publishes or of who follows, the life after it, and what must hold.

After each death what anybody can see is whole and right, or nothing of it is there; the next life, which is told nothing,
brings the run to its end; and what is served then is the last version, bit by bit.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from rollwire.consumers.weights.publisher import SnapshotPublisher
from rollwire.consumers.weights.verify import verify_version
from rollwire.ops.chaos.weights.effects import FOLDER, SIDES, Crash
from rollwire.ops.chaos.weights.lives import Ended, Life, Lives, MemoryLives, Role, Task
from rollwire.ops.chaos.weights.roles import WAIT_S, events_of, links_of, replica_of
from rollwire.ops.chaos.weights.states import LAST, PUBLISHER, digest_of, model_of, state_of
from rollwire.ops.chaos.weights.targets import Failure, version_in
from rollwire.schemas.errors import DeadlineExceeded, RollwireError, TargetFailed
from rollwire.schemas.records import FleetStatus, WeightVersion
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.seams.log import Log, TopicPartition, Writer
from rollwire.streams.seams.store import ObjectStore

_LOOK_S: Final = 0.05


class CellFailed(RollwireError):
    """What had to hold in a cell does not."""


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


def publisher_cell(bench: Bench, crash: Crash | None, kill_s: float | None = None) -> dict[str, int]:
    """Who publishes dies there. A replica follows all the while and compares whatever it serves. Returns the effects of a
    life without a crash. `kill_s`: it is killed so many seconds after its start, wherever it is then. Raises `CellFailed`.
    """
    lineage = new_lineage()
    watcher = MemoryLives(bench.log, bench.store).start(Task("follow", lineage, LAST))
    try:
        life = bench.lives.start(Task("publish", lineage, LAST, crash))
        if kill_s is not None and life.ended(kill_s) is None:
            life.kill()
        first = end_of(life, "who publishes")
        if crash is not None:
            _died_there(first, crash)
        if first.died:
            judge_versions(bench, lineage, complete=False)
            ended_well(
                end_of(bench.lives.start(Task("publish", lineage, LAST)), "the next life"), "the next life"
            )
        else:
            ended_well(first, "who publishes")
        judge_versions(bench, lineage, complete=True)
        ended_well(end_of(watcher, "the replica beside it"), "the replica beside it")
    finally:
        watcher.kill()
    return dict(first.seen)


def replica_cell(
    bench: Bench,
    crash: Crash | None,
    role: Role = "follow",
    *,
    folder: Path | None = None,
    failure: Failure | None = None,
    kill_s: float | None = None,
) -> dict[str, int]:
    """Who follows dies there. Each version is committed when the one before it is said to be served, so that the path is
    always the same. As `publisher_cell`. `failure`: its target fails once, nobody dies. `kill_s`: it is killed so many
    seconds after its start, wherever it is then.
    """
    lineage = new_lineage()
    events = stored(bench.store, lineage)
    writer, reports = bench.log.writer(), Reports(bench.log, lineage)
    task = Task(role, lineage, LAST, crash, "" if folder is None else str(folder), failure)
    commit_event(writer, events[0])
    life = bench.lives.start(task)
    fed, first = 0, None
    deadline = time.monotonic() + WAIT_S
    kill_at = None if kill_s is None else time.monotonic() + kill_s
    try:
        while True:
            if kill_at is not None and time.monotonic() >= kill_at:
                life.kill()
                kill_at = None
            for status in reports.poll(
                _LOOK_S if kill_at is None else max(0.0, min(_LOOK_S, kill_at - time.monotonic()))
            ):
                judge_status(status, "" if failure is None else "Failed")
                if fed < LAST and reports.settled(fed):
                    fed += 1
                    commit_event(writer, events[fed])
            end = life.ended()
            if end is None:
                if time.monotonic() > deadline:
                    raise CellFailed(f"version {fed} was not served within {WAIT_S:g} s")
                continue
            if first is not None or (crash is None and not (kill_s is not None and end.died)):
                ended_well(end, "who follows" if first is None else "the next life")
                first = first or end
                break
            if crash is not None:
                _died_there(end, crash)
            judge_folder(folder, reports)
            first = end
            life = bench.lives.start(msgspec.structs.replace(task, crash=None))
        reports.drain()
        judge_folder(folder, reports)
        last = [status.state for status in reports.all][-2:]
        if last != ["swapped", "stopped"] or reports.all[-1].version != LAST:
            raise CellFailed(f"the last reports are {last} of version {reports.all[-1].version}")
        if failure is not None and "refused" not in {status.state for status in reports.all}:
            raise CellFailed("nothing was refused, though the target failed")
        return dict(first.seen)
    finally:
        life.kill()
        reports.close()
        writer.close()


def judge_folder(folder: Path | None, reports: Reports) -> None:
    """What a reader of the folder finds is one whole version, as new as the last one said to be served. Raises
    `CellFailed`."""
    if folder is None:
        return
    said = max((status.version for status in reports.all if status.state == "swapped"), default=-1)
    try:
        found = version_in(folder)
    except TargetFailed as torn:
        raise CellFailed(str(torn)) from torn
    if (-1 if found is None else found) < said:
        raise CellFailed(f"version {said} was said to be served, the folder has {found}")


def judge_versions(bench: Bench, lineage: str, *, complete: bool) -> None:
    """Every version that is visible is there once, in order, and gives its bits along every way. Raises `CellFailed`."""
    events = events_of(bench.log, lineage, hidden=complete)
    numbers = [event.version for event in events]
    if numbers != list(range(LAST + 1 if complete else len(numbers))):
        raise CellFailed(f"the versions in the log are {numbers}")
    for event in events:
        if event.state_digest != digest_of(event.version):
            raise CellFailed(f"version {event.version} has the digest {event.state_digest[:16]}, not its own")
    for number in numbers if complete else numbers[-1:]:
        try:
            verify_version(bench.store, events, links_of(bench.log, lineage), number)
        except RollwireError as error:
            raise CellFailed(f"version {number} is visible and cannot be read: {error}") from error


def judge_status(status: FleetStatus, refused: str = "") -> None:
    """A replica says that it serves what it serves. `refused`: it may refuse a version for this. Raises `CellFailed`."""
    digest = "" if status.version < 0 else digest_of(status.version)
    if status.state_digest != digest:
        raise CellFailed(
            f"{status.state}: version {status.version} with the digest {status.state_digest[:16]}"
        )
    if status.state == "refused" and not (refused and refused in status.reason):
        raise CellFailed(f"version {status.wanted_version} was refused: {status.reason}")


class Reports:
    """What a replica reports from now on."""

    def __init__(self, log: Log, lineage: str) -> None:
        self._replica = replica_of(lineage)
        partitions = [TopicPartition("fleet-status", p) for p in range(log.partitions("fleet-status"))]
        ends = log.written_offsets(partitions)
        self._log = log
        self._reader = log.reader()
        self._reader.assign(ends)
        self.all: list[FleetStatus] = []

    def poll(self, timeout_s: float = _LOOK_S) -> list[FleetStatus]:
        events = [decode_record(record) for record in self._reader.poll(1_000, timeout_s)]
        new = [e for e in events if isinstance(e, FleetStatus) and e.replica == self._replica]
        self.all += new
        return new

    def settled(self, version: int) -> bool:
        """Whether the replica has done what it will do about a version: it serves it, or its user's probe refused it."""
        return any(
            status.wanted_version == version
            and (status.state == "swapped" or (status.state == "refused" and "ProbeFailed" in status.reason))
            for status in self.all
        )

    def drain(self) -> None:
        """Reads on to where the topic ends now. Raises `DeadlineExceeded`."""
        ends = self._log.end_offsets(list(self._reader.positions()))
        deadline = time.monotonic() + WAIT_S
        while any(at < ends[p] for p, at in self._reader.positions().items()):
            self.poll()
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"fleet-status was not read to its end within {WAIT_S:g} s")

    def close(self) -> None:
        self._reader.close()


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


def end_of(life: Life, who: str) -> Ended:
    """Raises `CellFailed` where it does not end."""
    end = life.ended(WAIT_S)
    if end is None:
        life.kill()
        raise CellFailed(f"{who} did not end within {WAIT_S:g} s")
    return end


def _died_there(end: Ended, crash: Crash) -> None:
    if not end.died:
        raise CellFailed(f"it was to die {crash}, and ended with exit code {end.code}: {end.why}")


def ended_well(end: Ended, who: str) -> None:
    if end.code != 0:
        raise CellFailed(f"{who} ended with exit code {end.code}: {end.why}")


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
