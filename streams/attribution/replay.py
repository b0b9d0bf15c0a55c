"""Attribution from the log alone: what every worker must have said, whatever happened to it. For audits and tests."""

from __future__ import annotations

from typing import Final, NamedTuple

from rollwire.schemas.errors import ConfigError, Refused
from rollwire.schemas.records import Feedback, Notice, ProductionRollout, Reward
from rollwire.streams.attribution.book import Book
from rollwire.streams.attribution.fold import Refusal
from rollwire.streams.attribution.intake import opened
from rollwire.streams.attribution.rulebook import Rulebook
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.scan import scan

_EVER: Final = 2**62


class Attributed(NamedTuple):
    """What follows from a log once every window is over."""

    rewards: dict[str, Reward]  # by rollout id
    letters: dict[tuple[int, int], str]  # (partition, offset) of `user-feedback` -> reason


def attributed(log: Log) -> Attributed:
    """Reads rules, rollouts and feedback to where they end now. Raises `LogError`; `IndexError` without rules in the log."""
    book = Book(_rulebook(log))
    letters: dict[tuple[int, int], str] = {}
    partitions = set()
    for record in scan(log, ["production-rollouts"]):
        partitions.add(record.partition)
        try:
            event = opened(record.topic, record.value, record.headers, record.key)
        except Refused:
            continue
        if isinstance(event, ProductionRollout):
            book.take_rollout(record.partition, event, record.offset, record.timestamp_ms * 1_000)
    for record in scan(log, ["user-feedback"]):
        partitions.add(record.partition)
        try:
            said = opened(record.topic, record.value, record.headers, record.key)
            if isinstance(said, Feedback):
                found = book.take_feedback(record.partition, said, record.offset, record.timestamp_ms * 1_000)
                if isinstance(found, Refusal):
                    letters[record.partition, record.offset] = found.reason
        except Refused as refused:
            letters[record.partition, record.offset] = refused.reason
    rewards: dict[str, Reward] = {}
    for partition in partitions:
        effects = book.advance(partition, _EVER, 0, _EVER)
        rewards.update((reward.rollout_id, reward) for reward in effects.rewards)
        letters.update(((p, refusal.offset), refusal.reason) for p, refusal in effects.refusals)
    return Attributed(rewards, letters)


def _rulebook(log: Log) -> Rulebook:
    book = Rulebook()
    for record in scan(log, ["notices"]):
        try:
            event = decode_record(record)
            if isinstance(event, Notice):
                book = book.after(event)
        except (ConfigError, Refused):
            continue
    return book
