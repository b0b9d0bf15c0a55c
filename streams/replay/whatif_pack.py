"""What-if replay of `pack`: groups and versions merged by time, the records' times as clock.

The versions are those of the history: what a trainer would have made of other plans nobody knows. Where a version comes for which
no plan was made, plans go on behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from rollwire.schemas.records import WeightVersion
from rollwire.streams.emit import take
from rollwire.streams.pack import PackConfig
from rollwire.streams.pack_step import VERSIONS, PackStep
from rollwire.streams.replay.source import Source, Timed, by_time
from rollwire.streams.replay.whatif_join import pass_time
from rollwire.streams.replay.window import Made, Window, shadowed
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.places import partitions_of
from rollwire.streams.seams.scan import scan

GROUPS = "groups"


class Line(NamedTuple):
    """Whose plans are made."""

    model: str
    lineage: str


class PackReplay:
    """`made` runs it once; `unplanned` counts the versions for which no plan was made."""

    def __init__(
        self, log: Log, config: PackConfig, line: Line, window: Window, *, groups: Log | None = None
    ) -> None:
        """`groups`: the log in which another replay has written them; else they are `log`'s."""
        self._log = log
        self._groups = groups
        self._line = line
        self._window = window
        self._step = PackStep(
            config,
            model=line.model,
            lineage=line.lineage,
            groups=(groups or log).partitions(GROUPS),
            fates=log.partitions("group-fates"),
        )
        self._held: deque[Timed] = deque()  # groups that come while there is no room
        self.unplanned = 0

    @property
    def waiting(self) -> int:
        """Groups that no plan took, nor anything dropped."""
        return self._step.packer.buffered + len(self._held)

    def made(self) -> Iterator[Made]:
        """Plans, fates, refusals and notices, by time."""
        window, step = self._window, self._step
        log, stamped = (self._log, None) if self._groups is None else (self._groups, shadowed)
        with (
            Source(log, partitions_of(log, [GROUPS]), stamped=stamped) as groups,
            Source(self._log, [VERSIONS]) as versions,
        ):
            if window.from_us:
                # What was published before is known when it begins.
                for record in scan(self._log, [VERSIONS.topic]):
                    if record.timestamp_ms * 1_000 < window.from_us:
                        step.restore(take(record))
            step.start(dict(groups.begins), {})
            last_us = 0
            for timed in by_time(groups.merged(), versions.merged()):
                if window.over(timed):
                    break
                yield from pass_time(step, timed.at_us)
                last_us = timed.at_us
                yield from self._take(timed)
                yield from self._admit(last_us)
            yield from pass_time(step, window.end_us(last_us))

    def _take(self, timed: Timed) -> Iterator[Made]:
        if timed.record.topic == GROUPS:
            # A shadow topic has only what the window holds.
            if self._groups is not None or self._window.holds(timed):
                self._held.append(timed)
            return
        if timed.at_us < self._window.from_us:
            return
        taken = take(timed.record)
        event = taken.event
        if isinstance(event, WeightVersion) and (event.model, event.lineage) == self._line:
            packer = self._step.packer
            if event.reverts_to is None and event.version >= packer.next_step:
                self.unplanned += 1
                packer.pass_over(event.version + 1)
        yield from (Made(timed.at_us, one) for one in self._step.feed([taken], timed.at_us))

    def _admit(self, at_us: int) -> Iterator[Made]:
        """Groups for which there is room now."""
        while self._held and not self._step.paused():
            record = self._held.popleft().record
            yield from (Made(at_us, one) for one in self._step.feed([take(record)], at_us))
