"""Audit replay of a join: it reads up to the cut of each outcome, decides that group again, and compares.

A cut says how far each input was read, not in which order. That is enough: what becomes of a group depends on its records
alone. It is not enough for a repeat, which is late or in conflict by what was read before it; see `Tally.letters`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Final, NamedTuple

from rollwire.schemas.errors import Refused
from rollwire.schemas.ids import opened_us
from rollwire.schemas.records import Cut, Event, Group, GroupFate
from rollwire.streams.assemble_answer import BASELINE
from rollwire.streams.assemble_config import LIVE, SAMPLED, Kind
from rollwire.streams.dead_letter import Place, letter_of
from rollwire.streams.emit import decode_record
from rollwire.streams.findings import Kind as Found
from rollwire.streams.findings import Report
from rollwire.streams.replay.aside import refusals_by, set_aside
from rollwire.streams.replay.join import Join
from rollwire.streams.replay.settings import Since, Spoken
from rollwire.streams.replay.source import Source
from rollwire.streams.replay.tally import Tally, Told, difference, moment, untold
from rollwire.streams.replay.window import EVER_US
from rollwire.streams.seams.log import Log, Outgoing, Record, TopicPartition
from rollwire.streams.seams.places import partitions_of

OUTCOMES: Final = ("groups", "group-fates")
_SETTLED_US: Final = 10_000_000  # an outcome follows what it follows from by far less
_AHEAD_US: Final = 60_000_000  # and a deadline strikes with a frontier that may lag by a producer's clock


class _Part:
    """One partition of the join."""

    def __init__(self, join: Join, since: Since) -> None:
        self.join = join
        self.since = since
        self.raw: dict[str, list[Record]] = defaultdict(list)  # of open groups, where settings may change
        self.whole_us: dict[str, int] = {}
        self.last_us = 0  # clock of the last cut


class _Gap(NamedTuple):
    """What is gone at the beginning of a partition: everything older than this."""

    first_us: int


def audit_join(log: Log, kind: Kind, spoken: Spoken, told: Told = untold) -> Report:
    """Of all partitions. Raises `ConfigError` where the log does not say by which settings it decided."""
    return _Audit(log, kind, spoken, told).run()


class _Audit:
    def __init__(self, log: Log, kind: Kind, spoken: Spoken, told: Told) -> None:
        self._told = told
        self._log = log
        self._kind = kind
        self._spoken = spoken
        self._many = len(spoken.since(kind.name)) > 1
        self._tally = Tally(kind.name)
        self._aside = set_aside(log)
        self._parts: dict[int, _Part] = {}
        self._outcomes: set[str] = set()
        self._refused: dict[Place, str] = {}
        self._read_to: dict[TopicPartition, int] = {}

    def run(self) -> Report:
        inputs = partitions_of(self._log, self._kind.joined)
        with (
            Source(self._log, partitions_of(self._log, OUTCOMES), lost=self._tally.lost) as outcomes,
            Source(self._log, inputs, lost=self._tally.lost) as source,
        ):
            gone = _gone(source)
            expired = _gone(outcomes)
            for timed in outcomes.merged():
                self._told(self._kind.name, timed.at_us)
                try:
                    event = decode_record(timed.record)
                except Refused:  # foreign: no processor of ours writes it, and who reads it refuses it
                    self._tally.checked["undecodable"] += 1
                    continue
                if decided_by(event) == self._kind.name and isinstance(event, Group | GroupFate):
                    self._outcome(timed.record, event, source, gone)
        self._missing(expired, gone)
        read = {place: (source.begins[place], to) for place, to in self._read_to.items()}
        self._tally.letters(refusals_by(self._log, self._kind.name), self._refused, read)
        return self._tally.report()

    def _outcome(
        self, record: Record, event: Group | GroupFate, source: Source, gone: Mapping[TopicPartition, _Gap]
    ) -> None:
        name, cut = event.group_id, event.cut
        if name in self._outcomes:
            self._tally.differs(record, f"group {name} had its outcome before", Found.TWICE)
            return
        self._outcomes.add(name)
        number = cut.inputs[0].partition if cut.inputs else 0
        part = self._part(number, cut.clock_us)
        part.last_us = max(part.last_us, cut.clock_us)
        for at in cut.inputs:
            partition = TopicPartition(at.topic, at.partition)
            if partition not in source.ends:
                self._tally.differs(record, f"its cut names {at.topic}[{at.partition}], which is no input")
                continue
            for one in source.below(partition, at.offset):
                self._feed(part, one)
            self._read_to[partition] = max(self._read_to.get(partition, 0), at.offset)
        made, why = self._decide(part, name, cut)
        if not self._tally.same(record, event, made):
            lost = any(
                opened_us(name) <= gap.first_us for place, gap in gone.items() if place.partition == number
            )
            if lost:
                self._tally.differs(record, f"group {name}: some of its records are gone", Found.HISTORY_GAP)
            else:
                self._tally.differs(record, f"group {name}: {why or difference(event, made)}")

    def _decide(self, part: _Part, name: str, cut: Cut) -> tuple[Event | None, str]:
        """The outcome again, and what is against it."""
        join = part.join
        if not join.is_open(name):
            return None, "nothing below its cut opens it"
        if not join.whole(name) and join.deadline_us(name) >= cut.clock_us:
            why = "it was decided before it was whole, and before its deadline"
            join.drop([name])
            return None, why
        outputs = join.close(name, cut)
        part.raw.pop(name, None)
        part.whole_us.pop(name, None)
        return _event(outputs[0]), ""

    def _feed(self, part: _Part, record: Record) -> None:
        place = record.topic, record.partition, record.offset
        if place in self._aside:
            return
        for output in part.join.read_on(record):
            letter = letter_of(output)
            if letter is not None:
                self._refused[letter.at] = letter.reason
        self._tally.checked["records"] += 1
        name = (record.key or b"").decode(errors="replace")
        if part.join.is_open(name):
            if self._many:
                part.raw[name].append(record)
            if name not in part.whole_us and part.join.whole(name):
                part.whole_us[name] = record.timestamp_ms * 1_000

    def _part(self, number: int, clock_us: int) -> _Part:
        since = self._spoken.at(self._kind.name, clock_us)
        part = self._parts.get(number)
        if part is None:
            made = Join(number, self._spoken.join(self._kind.name, since))
            part = self._parts[number] = _Part(made, since)
        elif part.since.from_us != since.from_us:
            # As a worker that starts with other settings does: what is open is read again.
            part.join = Join(number, self._spoken.join(self._kind.name, since))
            part.since = since
            for record in sorted((r for rs in part.raw.values() for r in rs), key=_order):
                part.join.read_on(record)
        return part

    def _missing(self, expired: Mapping[TopicPartition, _Gap], gone: Mapping[TopicPartition, _Gap]) -> None:
        """Groups that had to be decided, and have no outcome."""
        kept_from_us = max((gap.first_us for gap in (*expired.values(), *gone.values())), default=0)
        if kept_from_us:
            when = "at any time" if kept_from_us >= EVER_US else f"before {moment(kept_from_us)}"
            self._tally.notes.append(
                f"{self._kind.name}: of groups opened {when} inputs or outcomes are gone, so no outcome of theirs is missed"
            )
        for number, part in self._parts.items():
            for name in part.join.open_ids():
                if opened_us(name) <= kept_from_us:
                    continue
                whole_us = part.whole_us.get(name)
                due_us = part.join.deadline_us(name) + _AHEAD_US
                if (whole_us is not None and whole_us + _SETTLED_US < part.last_us) or due_us < part.last_us:
                    first = TopicPartition(self._kind.joined[0], number)
                    end = Record(first.topic, number, self._read_to.get(first, 0), 0, None, None, ())
                    what = "whole" if whole_us is not None else "past its deadline"
                    self._tally.differs(end, f"group {name} was {what} and has no outcome", Found.UNACCOUNTED)


def decided_by(event: Event) -> str | None:
    """Whose outcome an event is; None where it is none."""
    if isinstance(event, GroupFate):
        return event.decided_by
    if isinstance(event, Group):
        return LIVE.name if event.baseline == BASELINE else SAMPLED.name
    return None


def _gone(source: Source) -> dict[TopicPartition, _Gap]:
    """Of the partitions whose beginning is gone: the time of the first record that is left."""
    found: dict[TopicPartition, _Gap] = {}
    for partition, begin in source.begins.items():
        if begin > 0:
            first = source.peek(partition)
            found[partition] = _Gap(EVER_US if first is None else first.timestamp_ms * 1_000)
    return found


def _event(output: Outgoing) -> Event:
    return decode_record(Record(output.topic, 0, 0, 0, output.key, output.value, output.headers))


def _order(record: Record) -> tuple[str, int]:
    return record.topic, record.offset
