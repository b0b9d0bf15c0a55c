"""The account of all topics: records in any order go in, each is looked for where it must have gone. Pure.

rollouts, rewards, routing-traces   the members of a group, the fate of one that `assemble` closed, a dead letter
production-rollouts                 the same, by `assemble-production`, whose the rewards of what people said are too
user-feedback                       the reward that closed its rollout's window, a fate of the rollout, a dead letter
groups                              a fate by `pack`, a dead letter
(production-)groups-closed          the group or the fate that it announces
group-fates                         of a trained group: its plan
packed-batches                      the ranges that the training step of its number consumed, or a revert that passes it over
train-steps, weight-versions        each other, one to one; versions without a hole
dead-letters                        the record that was refused; of a replayed letter: its event, once a mark
the rest                            the codec

accepted    it went on: became part of a group, a plan, a step, a version
refused     it lies whole in `dead-letters`
shed        it was dropped by a rule, and a fate names the rule; a plan: by a revert that it did not know of
pending     none of these, and at or above the committed offset of who reads it; feedback: its window is open
missing     none of these, and below that offset: lost
extra       twice what may be once, or made from a record that does not exist
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rollwire.consumers.audit.hours import FlowHour, HourLine, hour_name, hour_of
from rollwire.consumers.audit.hours_columns import UNNAMED, Column, packed
from rollwire.consumers.audit.hours_facts import Extra, Facts
from rollwire.consumers.audit.hours_flows import count_flows
from rollwire.consumers.audit.hours_judge import (
    ACCEPTED,
    ANSWERS,
    CODES,
    JOINED,
    LIVE,
    LIVE_COLUMN,
    NOWHERE,
    PENDING,
    REFUSED,
    SHED,
    Closing,
    Judged,
    Unfounded,
    topic_of,
)
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import Refused
from rollwire.schemas.records import Feedback
from rollwire.streams.emit import decode_record, deletes
from rollwire.streams.seams.log import Record, TopicPartition
from rollwire.streams.settlement import REPLAY_COUNT, REPLAY_OF


class Missing(NamedTuple):
    """A record that went nowhere."""

    topic: str
    hour: int
    place: int


class Tally(NamedTuple):
    """An account that is added up; what is wrong has a place, and no name yet: see `hours_names`."""

    lines: tuple[HourLine, ...]
    flows: tuple[FlowHour, ...]
    missing: tuple[Missing, ...]
    extra: tuple[Extra, ...]
    unfounded: tuple[Unfounded, ...]
    unstarted: frozenset[int]  # keys of groups that were closed and never started
    lapsed: Mapping[str, int]  # by topic

    @property
    def exact(self) -> bool:
        return not any(line.gap for line in self.lines) and not any(
            flow.lost or flow.unstarted for flow in self.flows
        )


class Book:
    """Collects records of all topics; `close` adds them up. What it keeps of a record is a few numbers."""

    def __init__(self) -> None:
        self._columns: dict[str, Column] = {topic: Column() for topic in (*TOPICS, LIVE_COLUMN)}
        self._facts = Facts()
        self._copies: Counter[int] = Counter()  # replayed records, by the letter they name
        self.records = 0

    def add(self, record: Record) -> None:
        topic, hour = record.topic, hour_of(record.timestamp_ms)
        place = packed(record.partition, record.offset)
        self.records += 1
        event_id = replay_of = ""
        for name, value in record.headers:
            if name == "ce_id":
                event_id = "" if value is None else value.decode(errors="replace")
            elif name == REPLAY_OF:
                replay_of = self._replay(record, value or b"", place, hour)
        if topic in JOINED:
            self._joined(record, event_id, replay_of, place, hour)
            return
        key = hash(event_id)
        try:
            event = decode_record(record)
            if isinstance(event, Feedback):
                key = hash(event.rollout_id)
            else:
                self._facts.learn(event, topic, place, hour, event_id, replay_of)
        except Refused:
            if not deletes(record):
                key = UNNAMED
        self._columns[topic].add(place, hour, key)

    def _joined(self, record: Record, event_id: str, replay_of: str, place: int, hour: int) -> None:
        """Told by their headers: what they say is the codec's and assemble's to judge. But of rewards of what people said
        the rollout is learnt, whose window they close."""
        topic, rollout_id = record.topic, event_id
        if topic not in ANSWERS:
            rollout_id, _, rest = event_id.partition("/")
            if topic == LIVE[0] and rest.split("/", 1)[0] == LIVE[2]:
                try:
                    self._facts.learn(decode_record(record), topic, place, hour, event_id, replay_of)
                    topic = LIVE_COLUMN
                except Refused:
                    rollout_id = ""
        column = self._columns[topic]
        column.add(place, hour, hash(rollout_id))
        column.groups.append(hash(rollout_id.rsplit(".", 1)[0]))

    def _replay(self, record: Record, value: bytes, place: int, hour: int) -> str:
        """The letter that a record replays."""
        of = value.decode(errors="replace")
        partition, colon, offset = of.partition(":")
        if colon and partition.isdecimal() and offset.isdecimal():
            self._copies[packed(int(partition), int(offset))] += 1
        count = next((v for name, v in record.headers if name == REPLAY_COUNT), None) or b""
        again = f"replay {count.decode(errors='replace')} of dead letter {of}"
        self._facts.only_once(record.topic, again, place, hour, again)
        return of

    def close(
        self,
        committed: Mapping[TopicPartition, int],
        begins: Mapping[TopicPartition, int],
        live: Mapping[TopicPartition, int] | None = None,
        now_ms: int | None = None,
    ) -> Tally:
        """`committed`: offsets of `CONSUMERS`, absent = none; `live`: those of `assemble-production` in `rewards`. `begins`: what
        lies below was removed by retention. `now_ms`: by then retention may have removed letters that were old enough; without it,
        any."""
        facts = self._facts
        closing = Closing(facts, self._columns, begins, now_ms)
        judged: dict[str, Judged] = {}
        for name, column in self._columns.items():
            offsets = (live or {}) if name == LIVE_COLUMN else committed
            judged[name] = closing.judge(name, column, offsets)
        extra = [*facts.extra, *closing.letters(self._copies), *facts.holes()]
        unfounded = closing.unfounded()
        flows = count_flows(facts, judged, closing)
        return Tally(
            lines=_lines(judged, extra, unfounded),
            flows=flows.hours,
            missing=tuple(
                Missing(topic_of(name), int(hour), int(place))
                for name, one in judged.items()
                for hour, place in zip(
                    one.hours_N[one.codes_N == NOWHERE], one.places_N[one.codes_N == NOWHERE], strict=True
                )
            ),
            extra=tuple(extra),
            unfounded=unfounded,
            unstarted=flows.unstarted,
            lapsed=dict(sorted(closing.lapsed.items())),
        )


def _lines(
    judged: Mapping[str, Judged], extra: Sequence[Extra], unfounded: Sequence[Unfounded]
) -> tuple[HourLine, ...]:
    counts: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0] * CODES)
    for name, one in judged.items():
        found, times = np.unique(one.hours_N * CODES + one.codes_N, return_counts=True)
        for value, count in zip(found.tolist(), times.tolist(), strict=True):
            counts[topic_of(name), value // CODES][value % CODES] += count
    extras = Counter((one.topic, one.hour) for one in extra)
    extras.update((one.topic, one.hour) for one in unfounded)
    lines: list[HourLine] = []
    for topic, hour in sorted(counts.keys() | extras.keys()):
        row = counts[topic, hour]
        lines.append(
            HourLine(
                topic=topic,
                hour=hour_name(hour),
                received=sum(row),
                accepted=row[ACCEPTED],
                refused=row[REFUSED],
                shed=row[SHED],
                pending=row[PENDING],
                extra=extras[topic, hour],
            )
        )
    return tuple(lines)
