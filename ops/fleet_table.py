"""What the replicas of all fleets serve, from `fleet-status` and `weight-versions` alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rollwire.schemas.records import Event, FleetStatus, WeightVersion


class Row(NamedTuple):
    fleet: str
    replica: str
    target: str  # "" = the process that samples
    state: str  # of the last report
    served: int  # -1 = nothing yet
    wanted: int
    lag: int | None  # versions behind the newest of the served lineage; None = not known
    pause_ms: float  # of the last swap
    stage_ms: float
    fetched_bytes: int  # for the last swap
    channel: str
    age_s: float  # since the last report
    reason: str  # why the last version was refused; "" = it was not


class FleetTable:
    """Folds events in any order of topics, each topic in its own order."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], FleetStatus] = {}
        self._swapped: dict[tuple[str, str], FleetStatus] = {}
        self._newest: dict[str, int] = {}  # lineage -> version
        self._lineages: dict[tuple[int, str], str] = {}  # version and digest -> lineage

    def add(self, event: Event) -> None:
        match event:
            case FleetStatus():
                key = (event.fleet, event.replica)
                self._last[key] = event
                # What is served is said again now and then, and after a restart: that took no time.
                if event.state == "swapped" and (event.stage_ms or key not in self._swapped):
                    self._swapped[key] = event
            case WeightVersion():
                self._newest[event.lineage] = max(event.version, self._newest.get(event.lineage, -1))
                self._lineages[(event.version, event.state_digest)] = event.lineage
            case _:
                pass

    def rows(self, now_us: int) -> list[Row]:
        """By fleet and replica."""
        return [self._row(key, self._last[key], now_us) for key in sorted(self._last)]

    def _row(self, key: tuple[str, str], last: FleetStatus, now_us: int) -> Row:
        swapped = self._swapped.get(key)
        lineage = self._lineages.get((last.version, last.state_digest))
        return Row(
            fleet=last.fleet,
            replica=last.replica,
            target=last.target,
            state=last.state,
            served=last.version,
            wanted=last.wanted_version,
            lag=None if lineage is None else self._newest[lineage] - last.version,
            pause_ms=0.0 if swapped is None else swapped.pause_ms,
            stage_ms=0.0 if swapped is None else swapped.stage_ms,
            fetched_bytes=0 if swapped is None else swapped.fetched_bytes,
            channel=last.channel,
            age_s=(now_us - last.at_us) / 1e6,
            reason=last.reason,
        )


def fold(events: Iterable[Event]) -> FleetTable:
    table = FleetTable()
    for event in events:
        table.add(event)
    return table
