"""All rollouts that a worker holds, by partition: takes records, says what is to be written. Pure but for its own memory.

The table gets one entry a record that counts; what follows from the end of a window (its mark, the entries that are done
with) is written only after its reward is durable, so it is given apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final, NamedTuple

from rollwire.schemas.errors import Refused
from rollwire.schemas.ids import opened_us
from rollwire.schemas.records import Feedback, ProductionRollout, Reward
from rollwire.schemas.rules import check_value
from rollwire.streams.attribution.facts import (
    Answered,
    Closed,
    Entry,
    Said,
    answered_of,
    entry_of,
    key_of,
    said_of,
    value_of,
)
from rollwire.streams.attribution.fold import (
    Case,
    Refusal,
    close,
    expire,
    kept,
    take_answered,
    take_said,
)
from rollwire.streams.attribution.rulebook import Rulebook
from rollwire.streams.attribution.tally import Tally, share_of

AHEAD_US: Final = 300_000_000
"""A client's clock may be so much ahead of the broker's, or of the rollout's opening; more is no time of this event."""


class Write(NamedTuple):
    """One entry of the table; None deletes it."""

    partition: int
    key: bytes
    value: bytes | None


@dataclass(slots=True)
class Effects:
    """What is to be done outside. `writes` may go out at once, with `rewards` and `refusals`; `after` when those are durable."""

    writes: list[Write] = field(default_factory=list)
    rewards: list[Reward] = field(default_factory=list)
    refusals: list[tuple[int, Refusal]] = field(default_factory=list)  # (partition of user-feedback, ...)
    after: list[Write] = field(default_factory=list)


@dataclass(slots=True)
class _Part:
    cases: dict[str, Case] = field(default_factory=dict)
    due: list[tuple[int, str]] = field(default_factory=list)  # heap; a case may stand there too early


class Book:
    """Thread-confined."""

    def __init__(self, rulebook: Rulebook) -> None:
        self.rulebook = rulebook
        self.tally = Tally()
        self._parts: defaultdict[int, _Part] = defaultdict(_Part)
        self._seen: dict[int, int] = {}  # the next offset of `user-feedback`, by partition

    def start(self, partition: int, offset: int) -> None:
        """Reading of a partition of `user-feedback` goes on from an offset: everything before is settled, or in the table."""
        self._seen[partition] = offset

    @property
    def rollouts(self) -> int:
        """How many are held: waiting for, open, or closed lately."""
        return sum(len(part.cases) for part in self._parts.values())

    def take_feedback(
        self, partition: int, event: Feedback, offset: int, at_us: int
    ) -> list[Write] | Refusal:
        """The entries to write; or why it is refused, what waits may be so later. Raises `Refused` for what no rollout could
        change."""
        part = self._parts[partition]
        self._seen[partition] = offset + 1
        opened = opened_us(event.group_id)
        rules = self.rulebook.at(opened)
        if opened > at_us + AHEAD_US:
            raise Refused("time_invalid", f"rollout {event.rollout_id} is of the future", field="rollout_id")
        if at_us >= opened + rules.horizon_us:
            raise Refused("late", f"after the horizon of {event.rollout_id}", field="rollout_id")
        if not opened - AHEAD_US <= event.happened_us <= at_us + AHEAD_US:
            raise Refused(
                "time_invalid",
                f"happened_us={event.happened_us} is before the rollout was opened, or in the future",
                field="happened_us",
            )
        said = said_of(event, check_value(rules, event.signal, event.value, event.label), offset, at_us)
        name = event.rollout_id
        case = part.cases.get(name)
        if case is None:
            case = part.cases[name] = Case(opened, rules)
        open_ = case.answered is not None
        refusal = take_said(case, said)
        if refusal is not None:
            return refusal
        if not kept(case, said):
            return []
        if open_:
            self._said_more(case, said)
        else:
            heappush(part.due, (case.deadline_us(said), name))
        return [Write(partition, key_of(name, said), value_of(said))]

    def take_rollout(self, partition: int, event: ProductionRollout, offset: int, at_us: int) -> Effects:
        """A rollout that came after its horizon, or that was taken before, has no effect."""
        effects = Effects()
        part = self._parts[partition]
        opened = opened_us(event.group_id)
        rules = self.rulebook.at(opened)
        if at_us >= opened + rules.horizon_us or opened > at_us + AHEAD_US:
            return effects  # whoever joins rollouts and rewards refuses it
        name = event.rollout_id
        case = part.cases.get(name)
        if case is None:
            case = part.cases[name] = Case(opened, rules)
        elif case.answered is not None or case.closed is not None:
            return effects
        answered = answered_of(event, offset, at_us)
        waited = tuple(case.waiting.values())
        refusals = take_answered(case, answered)
        effects.refusals.extend((partition, refusal) for refusal in refusals)
        effects.writes.append(Write(partition, key_of(name, answered), value_of(answered)))
        # What waited and was not taken is done with: refused, or a repeat.
        effects.after.extend(
            Write(partition, key_of(name, said), None) for said in waited if not kept(case, said)
        )
        heappush(part.due, (case.due_us, name))
        self.tally.add(share_of(case))
        return effects

    def advance(self, partition: int, watermark_us: int, settled_us: int, most: int) -> Effects:
        """Closes windows, gives up waiting, forgets: of at most `most` rollouts whose time has come.

        `watermark_us`: everything before was read; `settled_us`: and its offsets are committed. A mark is forgotten only
        then: what is read again after a crash must still meet it.
        """
        effects = Effects()
        part = self._parts.get(partition)
        if part is None:
            return effects
        unsettled: list[tuple[int, str]] = []
        while part.due and part.due[0][0] <= watermark_us and most > 0:
            due, name = heappop(part.due)
            case = part.cases.get(name)
            if case is None:
                continue
            if case.closed is not None and case.due_us > settled_us:
                unsettled.append((max(due, case.due_us), name))
                continue
            if case.due_us <= watermark_us:
                most -= 1
                self._end(partition, part, name, case, watermark_us, effects)
            if name in part.cases:
                heappush(part.due, (case.due_us, name))
        for entry in unsettled:
            heappush(part.due, entry)
        return effects

    def next_due_us(self, partition: int) -> int | None:
        """When the next rollout's time comes, or came."""
        part = self._parts.get(partition)
        return part.due[0][0] if part is not None and part.due else None

    def load(self, partitions: Iterable[int], entries: Iterable[tuple[int, bytes, bytes]]) -> Effects:
        """Starts anew from the table's (partition, key, value). What stands there and is done with is deleted; what was refused
        is refused again: its dead letter may have been lost with the worker that made it."""
        self._parts.clear()
        self.tally = Tally()
        held = frozenset(partitions)
        found: dict[tuple[int, str], list[Entry]] = defaultdict(list)
        for partition, key, value in entries:
            if partition in held:
                name, entry = entry_of(key, value)
                found[partition, name].append(entry)
        effects = Effects()
        for (partition, name), listed in found.items():
            part = self._parts[partition]
            case = part.cases[name] = self._loaded(partition, name, listed, effects)
            heappush(part.due, (case.due_us, name))
            self.tally.add(share_of(case))
        return effects

    def _loaded(self, partition: int, name: str, entries: list[Entry], effects: Effects) -> Case:
        opened = opened_us(name.rpartition(".")[0])
        case = Case(opened, self.rulebook.at(opened))
        mark = next((entry for entry in entries if isinstance(entry, Closed)), None)
        said = sorted(entry for entry in entries if isinstance(entry, Said))
        answered = min((entry for entry in entries if isinstance(entry, Answered)), default=None)
        if mark is not None:
            case.closed = mark  # it was written behind the dead letters of all before it
            done = [entry for entry in entries if entry is not mark]
        else:
            case.waiting = {one.offset: one for one in said}
            if answered is not None:
                effects.refusals.extend((partition, refusal) for refusal in take_answered(case, answered))
            done = [one for one in said if not kept(case, one)]
        effects.after.extend(Write(partition, key_of(name, entry), None) for entry in done)
        return case

    def _said_more(self, case: Case, said: Said) -> None:
        """The same as taking the case's share off and adding it anew, for one more event of an open case."""
        answered = case.answered
        if answered is not None:
            self.tally.more(
                answered.version, answered.outcome, said.signal, said.value or 0.0, first=len(case.taken) == 1
            )

    def _end(
        self, partition: int, part: _Part, name: str, case: Case, watermark_us: int, effects: Effects
    ) -> None:
        if case.closed is not None:
            self.tally.add(share_of(case), -1)
            effects.after.append(Write(partition, key_of(name, case.closed), None))
            del part.cases[name]
        elif case.answered is not None:
            self.tally.add(share_of(case), -1)
            done: list[Entry] = [case.answered, *case.taken.values()]
            closing = close(case, name, self._seen.get(partition, 0))
            effects.rewards.append(closing.reward)
            effects.after.append(Write(partition, key_of(name, closing.mark), value_of(closing.mark)))
            effects.after.extend(Write(partition, key_of(name, entry), None) for entry in done)
            self.tally.add(share_of(case))
        else:
            waiting = dict(case.waiting)
            for refusal in expire(case, watermark_us):
                effects.refusals.append((partition, refusal))
                effects.after.append(Write(partition, key_of(name, waiting[refusal.offset]), None))
            if not case.waiting:
                del part.cases[name]
