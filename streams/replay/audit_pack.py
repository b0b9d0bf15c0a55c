"""Audit replay of `pack`: it reads up to each cut, decides again, and compares the plans and the fates of that cut.

What a cut does not say follows from the log: that the packer started anew (a cut that lies below one before it: what was not
decided is read again), and that all was read to its end (only then is a plan made of one kind alone, after its wait).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Final

from rollwire.schemas.errors import PlanViolation, Refused
from rollwire.schemas.records import Cut, Event, Group, GroupFate, PackedBatch, WeightVersion
from rollwire.streams.dead_letter import Place
from rollwire.streams.emit import decode_record, take
from rollwire.streams.findings import Kind as Found
from rollwire.streams.findings import Report
from rollwire.streams.pack import REMEMBERED, Decision, Packer
from rollwire.streams.pack_step import NAME, VERSIONS
from rollwire.streams.replay.aside import refusals_by, set_aside
from rollwire.streams.replay.settings import Since, Spoken
from rollwire.streams.replay.source import Source
from rollwire.streams.replay.tally import Tally, Told, difference, untold
from rollwire.streams.reverts import NO_REVERTS, Reverts
from rollwire.streams.seams.log import Log, Record, TopicPartition
from rollwire.streams.seams.places import partitions_of

OUTCOMES: Final = ("packed-batches", "group-fates")
_WINDOW_US: Final = 60_000_000  # the events of one transaction stand closer together than that
# Whether a group whose line was given up is quarantined depends on whether the revert was read before it.
_EITHER_WAY: Final = frozenset({"lineage_abandoned"})

Key = str | tuple[int, int]  # a group's id; a plan's step and rank


def _key(event: GroupFate | PackedBatch) -> Key:
    return event.group_id if isinstance(event, GroupFate) else (event.step, event.rank)


class Decided:
    """What was written with one cut."""

    def __init__(self, cut: Cut, order: tuple[int, int, int]) -> None:
        self.cut = cut
        self.order = order
        self.events: dict[Key, tuple[Record, GroupFate | PackedBatch]] = {}

    @property
    def first(self) -> Record:
        return next(iter(self.events.values()))[0]


def audit_pack(log: Log, spoken: Spoken, told: Told = untold, *, lineage: str | None = None) -> Report:
    """Of all that was packed; `lineage`: where settings were told for several. Raises `ConfigError` where the log does not
    say by which settings it decided."""
    return _Audit(log, spoken, lineage, told).run()


class _Audit:
    def __init__(self, log: Log, spoken: Spoken, lineage: str | None, told: Told) -> None:
        self._told = told
        self._log = log
        self._spoken = spoken
        self._lineage = lineage
        self._tally = Tally(NAME)
        self._aside = set_aside(log)
        self._groups = partitions_of(log, ("groups",))
        self._since: Since | None = None
        self._packer: Packer | None = None
        self._versions: list[tuple[int, WeightVersion]] = []  # in order, those that were read
        self._planned: dict[
            str, tuple[int, int | None]
        ] = {}  # lineage -> last step, and the last revert it knew
        # Of each partition the records from its first undecided one on, as they were read.
        self._kept: dict[int, OrderedDict[int, tuple[Record, Group | Refused]]] = {}
        self._fates: OrderedDict[str, None] = OrderedDict()  # the last ones, as many as a packer remembers
        self._read_to: dict[int, int] = {}
        self._refused: dict[Place, str] = {}

    def run(self) -> Report:
        places = [*self._groups, VERSIONS]
        with (
            Source(self._log, partitions_of(self._log, OUTCOMES), lost=self._tally.lost) as outcomes,
            Source(self._log, places, lost=self._tally.lost) as source,
        ):
            self._read_to = {p.partition: source.begins[p] for p in self._groups}
            self._kept = {p.partition: OrderedDict() for p in self._groups}
            begins = dict(self._read_to)
            batches_gone = any(at > 0 for p, at in outcomes.begins.items() if p.topic == OUTCOMES[0])
            for decided in self._decisions(outcomes):
                if all(
                    at.offset >= begins.get(at.partition, 0)
                    for at in decided.cut.inputs
                    if at.topic == "groups"
                ):
                    self._follow(decided, source, begins, batches_gone=batches_gone)
                else:
                    self._take_over(decided)
                    self._tally.checked["not followed"] += 1
        if self._tally.checked["not followed"]:
            self._tally.notes.append(
                f"pack: {self._tally.checked['not followed']} decisions are older than what is left of groups"
            )
        read = {TopicPartition("groups", p): (begins[p], at) for p, at in self._read_to.items()}
        self._tally.letters(refusals_by(self._log, NAME), self._refused, read, either_way=_EITHER_WAY)
        return self._tally.report()

    def _decisions(self, outcomes: Source) -> Iterator[Decided]:
        """Cut by cut, in the order of writing."""
        open_: dict[Cut, Decided] = {}
        for timed in outcomes.merged():
            self._told(NAME, timed.at_us)
            try:
                event = decode_record(timed.record)
            except Refused:
                self._tally.checked["undecodable"] += 1
                continue
            if not isinstance(event, PackedBatch | GroupFate):
                continue
            if isinstance(event, GroupFate) and event.decided_by != NAME:
                continue
            decided = open_.get(event.cut)
            if decided is None:
                read = sum(at.offset for at in event.cut.inputs)  # two decisions may be of one moment
                order = timed.record.timestamp_ms, event.cut.clock_us, read
                decided = open_[event.cut] = Decided(event.cut, order)
            if _key(event) in decided.events:
                self._tally.differs(timed.record, f"{_name(event)} stands there twice", Found.TWICE)
                continue
            decided.events[_key(event)] = timed.record, event
            old = [d for d in open_.values() if d.order[0] * 1_000 + _WINDOW_US < timed.at_us]
            for one in sorted(old, key=lambda d: d.order):
                del open_[one.cut]
                yield one
        yield from sorted(open_.values(), key=lambda d: d.order)

    def _follow(
        self, decided: Decided, source: Source, begins: dict[int, int], *, batches_gone: bool
    ) -> None:
        cut = decided.cut
        since = self._spoken.at(NAME, cut.clock_us, self._lineage)
        to = {at.partition: at.offset for at in cut.inputs if at.topic == "groups"}
        packer, since_before, self._since = self._packer, self._since, since
        if packer is None or since is not since_before or _falls(packer, to):
            packer = self._restarted(since)
        self._learn(packer, decided, source)
        self._receive(packer, to, source)
        events, refused = self._decide(packer, decided)
        made = {_key(event): event for event in events if isinstance(event, GroupFate | PackedBatch)}
        self._refused |= refused
        differs = self._compare(decided, made, begins, batches_gone=batches_gone)
        self._take_over(decided)
        # What differs once would differ for ever: it goes on from what was decided then.
        self._packer = None if differs else packer

    def _restarted(self, since: Since) -> Packer:
        """A packer as a new owner makes it, from what was decided until then."""
        positions = {p: next(iter(kept), self._read_to[p]) for p, kept in self._kept.items()}
        line = since.model, since.lineage
        own = [v for _, v in self._versions if (v.model, v.lineage) == line]
        reverts = reduce(Reverts.add, own, NO_REVERTS)
        step, newest = self._planned.get(since.lineage, (0, None))
        packer = Packer(
            self._spoken.pack(since),
            model=since.model,
            lineage=since.lineage,
            next_step=max([0, *(v.version for v in own), step if newest == reverts.newest else 0]) + 1,
            positions=positions,
            decided=self._fates_above(),
            decided_below=dict(self._read_to),
            reverts=reverts,
        )
        for offset, version in self._versions:
            packer.learn(version, offset)
        return packer

    def _fates_above(self) -> set[str]:
        return {
            group.group_id
            for kept in self._kept.values()
            for _, group in kept.values()
            if isinstance(group, Group) and group.group_id in self._fates
        }

    def _learn(self, packer: Packer, decided: Decided, source: Source) -> None:
        to = next((at.offset for at in decided.cut.inputs if (at.topic, at.partition) == VERSIONS), 0)
        for record in source.below(VERSIONS, to):
            event = take(record).event
            if not isinstance(event, WeightVersion):
                continue
            self._versions.append((record.offset, event))
            try:
                packer.learn(event, record.offset)
            except PlanViolation as error:
                self._tally.differs(record, str(error))
                continue

    def _receive(self, packer: Packer, to: dict[int, int], source: Source) -> None:
        for partition, end in to.items():
            kept = self._kept.setdefault(partition, OrderedDict())
            at = packer.read_to.get(partition, 0)
            for offset, (known, group) in list(kept.items()):
                if at <= offset < end:
                    packer.receive(known, group)
            for record in source.below(TopicPartition("groups", partition), end):
                opened = self._opened(record)
                if opened is None:
                    continue
                kept[record.offset] = record, opened
                self._tally.checked["records"] += 1
                packer.receive(record, opened)
            # A packer may have begun behind offsets that hold no event.
            packer.read_on(partition, end)
            self._read_to[partition] = max(self._read_to.get(partition, 0), end)

    def _opened(self, record: Record) -> Group | Refused | None:
        if (record.topic, record.partition, record.offset) in self._aside:
            return Refused("kills_worker", "set aside when it was read first")
        event = take(record).event
        if event is None or isinstance(event, Group | Refused):
            return event
        return Refused("wrong_schema", f"{type(event).__name__} is no input of pack")

    def _decide(self, packer: Packer, decided: Decided) -> tuple[list[Event], dict[Place, str]]:
        """All decisions of one moment."""
        events: list[Event] = []
        refused: dict[Place, str] = {}

        def run(*, at_end: bool) -> None:
            while True:
                said: Decision = packer.decide(decided.cut.clock_us, caught_up=True, at_end=at_end)
                events.extend(said.events)
                for record, why in said.refusals:
                    refused[record.topic, record.partition, record.offset] = why.reason
                if not said.changed:
                    return

        run(at_end=False)
        if not decided.events.keys() <= {_key(e) for e in events if isinstance(e, GroupFate | PackedBatch)}:
            run(at_end=True)
        return events, refused

    def _compare(
        self,
        decided: Decided,
        made: dict[Key, GroupFate | PackedBatch],
        begins: dict[int, int],
        *,
        batches_gone: bool,
    ) -> bool:
        """Whether anything is not as it was."""
        differs = False
        for key, (record, event) in decided.events.items():
            again = made.get(key)
            if self._tally.same(record, event, again):
                continue
            differs = True
            lost = any(begins.values()) and not self._known(decided)
            kind = Found.HISTORY_GAP if lost else Found.OUTCOME_DIFFERS
            why = "some of its groups are gone" if lost else difference(event, again)
            self._tally.differs(record, f"{_name(event)}: {why}", kind)
        for key in made.keys() - decided.events.keys():
            event = made[key]
            if batches_gone and isinstance(event, PackedBatch):
                continue
            differs = True
            self._tally.differs(
                decided.first, f"{_name(event)} follows from the cut of this record, and is not there"
            )
        return differs

    def _known(self, decided: Decided) -> bool:
        """Whether all groups of a decision were read."""
        names = {event.group_id for _, event in decided.events.values() if isinstance(event, GroupFate)}
        kept = {g.group_id for k in self._kept.values() for _, g in k.values() if isinstance(g, Group)}
        return names <= kept

    def _take_over(self, decided: Decided) -> None:
        """What was decided is decided, whatever came out of it now."""
        for _, event in decided.events.values():
            if isinstance(event, GroupFate):
                self._fates[event.group_id] = None
                continue
            step, newest = self._planned.get(event.lineage, (0, None))
            if (event.newest_revert or 0, event.step) > (newest or 0, step):
                self._planned[event.lineage] = event.step, event.newest_revert
        while len(self._fates) > REMEMBERED:
            self._fates.popitem(last=False)
        for kept in self._kept.values():
            while kept:
                offset, (_, group) = next(iter(kept.items()))
                if isinstance(group, Group) and group.group_id not in self._fates:
                    break
                del kept[offset]


def _falls(packer: Packer, to: Mapping[int, int]) -> bool:
    """Whether a cut lies below what the packer has read: another one made it."""
    read_to = packer.read_to
    return any(at < read_to.get(partition, 0) for partition, at in to.items())


def _name(event: Event) -> str:
    if isinstance(event, PackedBatch):
        return f"the plan of step {event.step}, rank {event.rank}"
    return f"the fate of group {event.group_id}" if isinstance(event, GroupFate) else type(event).__name__
