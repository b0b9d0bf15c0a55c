"""What-if replay of a join, or of attribution: one partition, its inputs merged by time, the records' times as clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from rollwire.schemas.errors import Refused
from rollwire.schemas.records import Feedback, ProductionRollout
from rollwire.schemas.rules import Rules
from rollwire.streams.assemble import Assembler
from rollwire.streams.assemble_config import REWARDS, JoinConfig
from rollwire.streams.attribution.book import Book, Effects
from rollwire.streams.attribution.fold import Refusal
from rollwire.streams.attribution.intake import opened
from rollwire.streams.attribution.letters import FEEDBACK, letters_of, refused_letter
from rollwire.streams.attribution.outbox import SOURCE
from rollwire.streams.attribution.rulebook import Rulebook, Since
from rollwire.streams.emit import outgoing, take
from rollwire.streams.replay.settings import read_rulebook
from rollwire.streams.replay.source import Source, Timed, by_time
from rollwire.streams.replay.window import EVER_US, Made, Window, shadowed
from rollwire.streams.seams.log import Log, Outgoing, Record, TopicPartition
from rollwire.streams.step import Step

ANSWERS: Final = "production-rollouts"
_REMEMBERED: Final = 10_000  # records of feedback that are at hand if they are refused later


def replay_join(
    log: Log, config: JoinConfig, partition: int, window: Window, *, rewards: Log | None = None
) -> Iterator[Made]:
    """Groups, fates, marks and refusals of one partition, by time. `rewards`: the log in which another replay has written
    them; else they are `log`'s."""
    places = [TopicPartition(topic, partition) for topic in config.topics]
    step = Assembler(partition, config)
    step.start(dict.fromkeys(places, 0), {})
    own = [p for p in places if rewards is None or p.topic != REWARDS]
    with Source(log, own) as source:
        if rewards is None:
            yield from _driven(step, source.merged(), window)
            return
        with Source(rewards, [TopicPartition(REWARDS, partition)], stamped=shadowed) as again:
            yield from _driven(step, by_time(source.merged(), again.merged()), window)


def _driven(step: Assembler, merged: Iterator[Timed], window: Window) -> Iterator[Made]:
    last_us = 0
    for timed in merged:
        if window.over(timed):
            break
        if not window.holds(timed):
            continue
        yield from pass_time(step, timed.at_us)
        last_us = timed.at_us
        yield from (Made(last_us, one) for one in step.feed([take(timed.record)], last_us))
        step.committable()  # what closed groups left behind goes
    yield from pass_time(step, window.end_us(last_us))


def pass_time(step: Step, to_us: int) -> Iterator[Made]:
    """What time alone decides before `to_us`: everything up to then was read."""
    inputs = step.inputs
    while (due_us := step.due_us()) is not None and due_us < to_us:
        clock_us = due_us + 1  # a deadline strikes behind its moment
        yield from (Made(clock_us, one) for one in step.tick(clock_us, inputs))
        if step.due_us() == due_us:
            return  # it waits for something else than time


def replay_attribution(log: Log, partition: int, window: Window, rules: Rules | None) -> Iterator[Made]:
    """Rewards and refusals of one partition, by time; by `rules`, or by those that the log says."""
    book = Book(Rulebook((Since(0, rules),)) if rules is not None else read_rulebook(log))
    if not book.rulebook.entries:
        return
    recent: OrderedDict[int, Record] = OrderedDict()
    last_us = 0
    with Source(log, [TopicPartition(ANSWERS, partition), TopicPartition(FEEDBACK, partition)]) as source:
        for timed in source.merged():
            if window.over(timed):
                break
            if not window.holds(timed):
                continue
            yield from _windows(log, book, partition, timed.at_us, recent)
            last_us = timed.at_us
            yield from (Made(last_us, one) for one in _took(log, book, timed, recent))
        yield from _windows(log, book, partition, window.end_us(last_us), recent)


def _took(log: Log, book: Book, timed: Timed, recent: OrderedDict[int, Record]) -> Iterator[Outgoing]:
    record = timed.record
    if record.topic == FEEDBACK:
        recent[record.offset] = record
        if len(recent) > _REMEMBERED:
            recent.popitem(last=False)
    try:
        event = opened(record.topic, record.value, record.headers, record.key)
        if isinstance(event, ProductionRollout):
            effects = book.take_rollout(record.partition, event, record.offset, timed.at_us)
            yield from _written(log, effects, recent)
        elif isinstance(event, Feedback):
            said = book.take_feedback(record.partition, event, record.offset, timed.at_us)
            if isinstance(said, Refusal):
                yield refused_letter(record, said.reason, said.detail, said.at_us)
    except Refused as refused:
        if record.topic == FEEDBACK:  # of a rollout, it is the join's to refuse
            yield refused_letter(record, refused.reason, refused.detail, timed.at_us)


def _windows(
    log: Log, book: Book, partition: int, to_us: int, recent: OrderedDict[int, Record]
) -> Iterator[Made]:
    """Windows that end at or before `to_us`, each at its end."""
    while (due_us := book.next_due_us(partition)) is not None and due_us <= to_us:
        effects = book.advance(partition, due_us, due_us, EVER_US)
        yield from (Made(due_us, one) for one in _written(log, effects, recent))
        if book.next_due_us(partition) == due_us:
            return


def _written(log: Log, effects: Effects, recent: OrderedDict[int, Record]) -> Iterator[Outgoing]:
    for reward in effects.rewards:
        yield outgoing(reward, source=SOURCE, time_us=reward.scored_us)
    for partition, refusal in effects.refusals:
        record = recent.get(refusal.offset)
        if record is None:
            yield from letters_of(log, [(partition, refusal)])
        else:
            yield refused_letter(record, refusal.reason, refusal.detail, refusal.at_us)
