"""What must hold in a cell: versions in the log, folders, reports, and how lives end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from rollwire.consumers.weights.verify import verify_version
from rollwire.ops.chaos.weights.effects import Crash
from rollwire.ops.chaos.weights.lives import Ended, Life
from rollwire.ops.chaos.weights.roles import WAIT_S, events_of, links_of, replica_of
from rollwire.ops.chaos.weights.states import LAST, digest_of
from rollwire.ops.chaos.weights.targets import version_in
from rollwire.schemas.errors import DeadlineExceeded, RollwireError, TargetFailed
from rollwire.schemas.records import FleetStatus
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.log import Log, TopicPartition
from rollwire.streams.seams.store import ObjectStore

LOOK_S: Final = 0.05


class CellFailed(RollwireError):
    """What had to hold in a cell does not."""


class NotReached(CellFailed):
    """A life did well without ever coming to where it was to die."""


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


def judge_versions(log: Log, store: ObjectStore, lineage: str, *, complete: bool) -> None:
    """Every version that is visible is there once, in order, and gives its bits along every way. Raises `CellFailed`."""
    events = events_of(log, lineage, hidden=complete)
    numbers = [event.version for event in events]
    if numbers != list(range(LAST + 1 if complete else len(numbers))):
        raise CellFailed(f"the versions in the log are {numbers}")
    for event in events:
        if event.state_digest != digest_of(event.version):
            raise CellFailed(f"version {event.version} has the digest {event.state_digest[:16]}, not its own")
    for number in numbers if complete else numbers[-1:]:
        try:
            verify_version(store, events, links_of(log, lineage), number)
        except RollwireError as error:
            raise CellFailed(f"version {number} is visible and cannot be read: {error}") from error


def judge_status(status: FleetStatus, *refused: str) -> None:
    """A replica says that it serves what it serves. `refused`: it may refuse a version for these. Raises `CellFailed`."""
    digest = "" if status.version < 0 else digest_of(status.version)
    if status.state_digest != digest:
        raise CellFailed(
            f"{status.state}: version {status.version} with the digest {status.state_digest[:16]}"
        )
    if status.state == "refused" and not any(text and text in status.reason for text in refused):
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

    def poll(self, timeout_s: float = LOOK_S) -> list[FleetStatus]:
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


def end_of(life: Life, who: str) -> Ended:
    """Raises `CellFailed` where it does not end."""
    end = life.ended(WAIT_S)
    if end is None:
        life.kill()
        raise CellFailed(f"{who} did not end within {WAIT_S:g} s")
    return end


def died_there(end: Ended, crash: Crash) -> None:
    if end.code == 0:
        raise NotReached(f"it was to die {crash}, and ended with exit code 0")
    if not end.died:
        raise CellFailed(f"it was to die {crash}, and ended with exit code {end.code}: {end.why}")


def ended_well(end: Ended, who: str) -> None:
    if end.code != 0:
        raise CellFailed(f"{who} ended with exit code {end.code}: {end.why}")
