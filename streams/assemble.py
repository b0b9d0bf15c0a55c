"""assemble: joins rollouts, rewards and routing traces of a group, once, whatever happens. A pure step.

A group is opened by the first event that names it and closed once: when it is whole, or at its deadline. The deadline
is the group's opening time (its id is a UUIDv7) plus `group_deadline_s`, and an event counts if its *record's* time is not
later. So what belongs to a group depends on the log alone, not on who reads it when, in which order, or how often: a
worker that was away for an hour closes the groups of that hour as one that was there would have. A deadline strikes when
every input was read past it. An event that is later than the deadline is refused, but opens its group all the same: a
group of which nothing came in time (the broker was away, say) gets its fate too, and its slot goes back.

There is one instance for what was sampled for training and one for live traffic, whose long windows hold back nobody
(`assemble_config.Kind`). Both read `rewards`, and each passes the other's by.

State is not written elsewhere. The committed offset stays at the oldest open group; `groups-closed` names those that were
closed above it; the read position (see `Step`) tells which refusals were written already. It is one position over all
inputs: after a restart, new records wait until the known ones of every input were read again (`CatchUp`).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from rollwire.schemas.errors import Refused
from rollwire.schemas.ids import opened_us
from rollwire.schemas.records import Cut, Event, Group, Position, Reward, Rollout
from rollwire.schemas.records import RoutingTrace as Trace
from rollwire.streams.assemble_config import REWARDS, JoinConfig
from rollwire.streams.assemble_group import OpenGroup, group_of
from rollwire.streams.catch_up import CatchUp
from rollwire.streams.dead_letter import dead_letter
from rollwire.streams.emit import outgoing, outgoing_group
from rollwire.streams.seams.log import Outgoing, Record, TopicPartition
from rollwire.streams.step import Changelog, Memory, Taken


class Assembler:
    """The state machine of one partition; implements `rollwire.streams.step.Step`."""

    def __init__(self, partition: int, config: JoinConfig) -> None:
        self._kind = kind = config.kind
        self._source = f"rollwire/{kind.name}"
        self.inputs: tuple[TopicPartition, ...] = tuple(
            TopicPartition(topic, partition) for topic in config.topics
        )
        self.memories: tuple[Memory, ...] = (Changelog(TopicPartition(kind.closed, partition)),)
        self._config = config
        self._deadline_us = round(config.group_deadline_s * 1e6)
        self._horizon_us = round(config.late_horizon_s * 1e6)
        self._grace_us = round(config.grace_s * 1e6)
        self._ahead_us = round(config.ahead_s * 1e6)
        self._open: dict[str, OpenGroup] = {}
        self._closed: set[str] = set()
        self._due: list[tuple[int, str]] = []  # heap: (when the deadline strikes, group)
        self._forget: list[tuple[int, str]] = []  # heap: (when it may be forgotten, closed group)
        self._next = dict.fromkeys(self.inputs, 0)
        self._decided = dict.fromkeys(self.inputs, 0)  # the read marks that were committed before this start
        self._catch_up = CatchUp(self._next, {})
        self._frontier_us = dict.fromkeys(self.inputs, 0)  # every record up to this time was read
        # Of each open group, the first record in each input: in order, closed groups leave lazily.
        self._firsts: dict[TopicPartition, deque[tuple[int, str]]] = {p: deque() for p in self.inputs}
        self._entered: set[tuple[TopicPartition, str]] = set()

    # -- the step -----------------------------------------------------------------------------------------------

    def restore(self, taken: Taken) -> None:
        # What was refused is not ours: nobody but assemble writes here, and a foreign record closes nothing.
        if isinstance(taken.event, self._kind.mark):
            self._remember(taken.event.group_id)

    def start(self, committed: Mapping[TopicPartition, int], read: Mapping[TopicPartition, int]) -> None:
        self._next = {p: committed[p] for p in self.inputs}
        self._decided = {p: read.get(p, 0) for p in self.inputs}
        self._catch_up = CatchUp(self._next, self._decided)

    def feed(self, taken: Sequence[Taken], clock_us: int) -> list[Outgoing]:
        outputs: list[Outgoing] = []
        for record, event in self._catch_up.admit(taken):
            self._take(record, event, clock_us, outputs)
        self._advance(clock_us, outputs)
        return outputs

    def tick(self, clock_us: int, at_end: Collection[TopicPartition]) -> list[Outgoing]:
        for partition in at_end:
            if not self._catch_up.holds(partition):
                self._frontier_us[partition] = max(self._frontier_us[partition], clock_us)
        outputs: list[Outgoing] = []
        self._advance(clock_us, outputs)
        return outputs

    def due_us(self) -> int | None:
        times = [heap[0][0] for heap in (self._due, self._forget) if heap]
        return min(times, default=None)

    def paused(self) -> Collection[TopicPartition]:
        return self._catch_up.paused()  # else nothing is: deadlines bound what is open

    def read(self) -> dict[TopicPartition, int]:
        # While it re-reads what an earlier owner had decided, the mark must not fall back.
        return {p: max(at, self._decided[p]) for p, at in self._next.items()}

    def committable(self) -> dict[TopicPartition, int]:
        offsets = dict(self._next)
        for partition, firsts in self._firsts.items():
            while firsts and firsts[0][1] not in self._open:
                self._entered.discard((partition, firsts.popleft()[1]))
            if firsts:
                offsets[partition] = firsts[0][0]
        return offsets

    # -- what people ask ------------------------------------------------------------------------------------------

    @property
    def open_groups(self) -> int:
        return len(self._open)

    @property
    def closed_groups(self) -> int:
        return len(self._closed)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _take(
        self, record: Record, decoded: Event | Refused | None, clock_us: int, outputs: list[Outgoing]
    ) -> None:
        partition = TopicPartition(record.topic, record.partition)
        self._next[partition] = record.offset + 1
        record_us = record.timestamp_ms * 1_000
        # A producer's clock may run ahead; ours bounds what its records say about the others.
        self._frontier_us[partition] = max(self._frontier_us[partition], min(record_us, clock_us))
        again = record.offset < self._decided[partition]
        if decoded is None:
            return  # a delete: none of the inputs is compacted
        if record.topic == REWARDS and self._kind.passes_by(record, decoded):
            return
        group: OpenGroup | None = None
        event: Event | None = None
        try:
            if isinstance(decoded, Refused):
                raise decoded
            event = decoded
            group_id = group_of(event)
            if again and group_id in self._closed:
                return  # part of a decision that was written before
            found = self._group(group_id, record_us)
            self._enter(partition, record.offset, group_id)
            if record_us > found.deadline_us:
                # It does not count, but its group gets a fate by it: a slot waits for one.
                raise Refused("late", self._late((record_us - found.deadline_us + self._deadline_us) / 1e6))
            group = found
            self._add(group, record, event, clock_us, outputs)
        except Refused as refused:
            if not self._written(record, group, event):
                outputs.append(dead_letter(record, refused, refused_by=self._kind.name, time_us=clock_us))
            return
        group.fresh = group.fresh or not again
        if group.whole(traces=self._config.traced):
            if group.fresh:
                self._close(group, clock_us, outputs)
            else:  # whole by what was read before: closed then, even if its mark has left `groups-closed` since
                self._forget_open(group)

    def _add(
        self, group: OpenGroup, record: Record, event: Event, clock_us: int, outputs: list[Outgoing]
    ) -> None:
        if isinstance(event, Reward):
            group.take_reward(record, event)
        elif isinstance(event, Trace):
            group.take_trace(record, event)
        elif isinstance(event, Rollout):
            for bad in group.take_rollout(record.offset, event, record.value):
                if not self._written(bad.record, group, bad.event):
                    outputs.append(
                        dead_letter(bad.record, bad.refused, refused_by=self._kind.name, time_us=clock_us)
                    )

    def _written(self, record: Record, group: OpenGroup | None, event: Event | None) -> bool:
        """Whether an earlier owner wrote this refusal: it had read the record and the rollout that it is judged by."""
        if record.offset >= self._decided[TopicPartition(record.topic, record.partition)]:
            return False
        if group is None or event is None:
            return True
        return group.judged_by(event) < self._decided[self.inputs[0]]

    def _group(self, group_id: str, record_us: int) -> OpenGroup:
        """The open group of an event. Raises `Refused`: too late for a look-up, or from a clock that is wrong."""
        opened = opened_us(group_id)
        late_us = record_us - opened
        if late_us > self._horizon_us:
            raise Refused("late", self._late(late_us / 1e6))
        if group_id in self._closed:
            raise Refused("late", "its group is closed")
        if late_us < -self._ahead_us:
            raise Refused(
                "time_invalid", f"its group is opened {-late_us / 1e6:.1f} s after the event was written"
            )
        group = self._open.get(group_id)
        if group is None:
            group = self._open[group_id] = self._kind.open_group(group_id, opened + self._deadline_us)
            heapq.heappush(self._due, (group.deadline_us + self._grace_us, group_id))
        return group

    def _late(self, seconds: float) -> str:
        return f"{seconds:.1f} s after its group was opened, {self._config.group_deadline_s:g} s count"

    def _enter(self, partition: TopicPartition, offset: int, group_id: str) -> None:
        if (partition, group_id) not in self._entered:
            self._entered.add((partition, group_id))
            self._firsts[partition].append((offset, group_id))

    def _advance(self, clock_us: int, outputs: list[Outgoing]) -> None:
        """Closes what is due and forgets what is older than the horizon."""
        frontier_us = min(self._frontier_us.values())
        while self._due and (self._due[0][1] not in self._open or self._due[0][0] < frontier_us):
            group = self._open.get(heapq.heappop(self._due)[1])
            if group is not None:
                self._close(group, clock_us, outputs)
        while self._forget and self._forget[0][0] < frontier_us:
            self._closed.discard(heapq.heappop(self._forget)[1])

    def _close(self, group: OpenGroup, clock_us: int, outputs: list[Outgoing]) -> None:
        cut = self._cut(clock_us)
        outcome = self._config.decide(group, cut)
        try:
            if isinstance(outcome, Group):
                encoded = outgoing_group(
                    outcome, group.values_of(outcome), source=self._source, time_us=clock_us
                )
            else:
                encoded = outgoing(outcome, source=self._source, time_us=clock_us)
        except Refused as refused:  # too large for one record, say
            outcome = group.fate(cut, "dropped", refused.reason, refused.detail)
            encoded = outgoing(outcome, source=self._source, time_us=clock_us)
        closed = self._kind.mark(
            group_id=group.group_id,
            fate="kept" if isinstance(outcome, Group) else outcome.fate,
            reason="" if isinstance(outcome, Group) else outcome.reason,
            closed_us=clock_us,
        )
        outputs += (encoded, outgoing(closed, source=self._source, time_us=clock_us))
        self._forget_open(group)

    def _forget_open(self, group: OpenGroup) -> None:
        del self._open[group.group_id]
        self._remember(group.group_id)

    def _remember(self, group_id: str) -> None:
        if group_id not in self._closed:
            self._closed.add(group_id)
            # Not before the last event that is looked up: clocks differ, and record times are cut to milliseconds.
            forget_us = opened_us(group_id) + self._horizon_us + self._grace_us + 1_000
            heapq.heappush(self._forget, (forget_us, group_id))

    def _cut(self, clock_us: int) -> Cut:
        return Cut(inputs=tuple(_positions(self._next.items())), clock_us=clock_us)


def _positions(offsets: Iterable[tuple[TopicPartition, int]]) -> Iterable[Position]:
    for partition, offset in offsets:
        yield Position(topic=partition.topic, partition=partition.partition, offset=offset)
