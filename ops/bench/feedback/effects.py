"""What is behind the stream's repeat check: attribution's own book, driven over the topic as a replay would, in this process.

Every rollout that was spoken of is given to it as answered, all windows are closed, and the ids in the rewards' evidence are
counted: none twice, and none missing that the topic has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from rollwire.ops.bench.feedback.bodies import SIGNALS, Bodies
from rollwire.ops.bench.feedback.traffic import answer
from rollwire.schemas.partitioner import partition_for
from rollwire.schemas.records import Feedback
from rollwire.schemas.rules import default_rules
from rollwire.streams.attribution.book import Book
from rollwire.streams.attribution.rulebook import Rulebook, Since
from rollwire.streams.seams.log import Record

_AT_ONCE: Final = 10_000
_LATER_US: Final = 3 * 3_600_000_000  # behind every window


class Effects(NamedTuple):
    events: int  # distinct ones behind a reward
    repeated: int  # ids that stand in evidence again
    refused: int  # dead letters


class EffectsOf:
    """The events of some phases: `bodies`, and how many events of each were sent."""

    def __init__(self, bodies: Sequence[tuple[Bodies, int]], partitions: int) -> None:
        self._names = frozenset(one.name for one, _ in bodies)
        self._partitions = partitions
        self._book = Book(Rulebook((Since(0, default_rules()),)))
        self._latest_us = 0
        for one, sent in bodies:
            for number in range(-(-sent // SIGNALS)):
                # What attribution keeps of an answer is not its content: the same for all.
                event = answer(one, number, bytes(4_000), bytes(3_000))
                partition = partition_for(event.group_id.encode(), partitions)
                self._book.take_rollout(partition, event, number, one.at_us)

    def take(self, record: Record, event: Feedback) -> None:
        """Raises `Refused` where attribution would refuse it."""
        if event.feedback_id.rpartition("-")[0] in self._names:
            at_us = record.timestamp_ms * 1_000
            self._latest_us = max(self._latest_us, at_us)
            self._book.take_feedback(record.partition, event, record.offset, at_us)

    def effects(self) -> Effects:
        seen: Counter[str] = Counter()
        refused = 0
        until_us = self._latest_us + _LATER_US
        for partition in range(self._partitions):
            while (due := self._book.next_due_us(partition)) is not None and due <= until_us:
                found = self._book.advance(partition, until_us, until_us, _AT_ONCE)
                refused += len(found.refusals)
                for reward in found.rewards:
                    seen.update(reward.evidence)
        return Effects(len(seen), seen.total() - len(seen), refused)
