"""What attribution writes: in batches, in two steps, each durable before the next one and before any offset is committed.

    1   entries of the table, rewards, dead letters
    2   marks of closed windows and deletions: once they are there, the rewards of step 1 are given no more

A crash anywhere leaves step 1 without step 2 at worst: it is done again, with the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rollwire.streams.attribution.book import Effects, Write
from rollwire.streams.attribution.config import CHANGELOG
from rollwire.streams.attribution.fold import Refusal
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.log import Outgoing, Writer

SOURCE = "rollwire/attribution"

Letters = Callable[[Sequence[tuple[int, Refusal]]], list[Outgoing]]
"""Dead letters of feedback records, by (partition, refusal): reads the records from the log."""


class Outbox:
    """Filled by one thread; `take` there, `deliver` in any one other."""

    def __init__(self, writer: Writer, letters: Letters) -> None:
        self._writer = writer
        self._letters = letters
        self._now: list[Outgoing] = []
        self._refusals: list[tuple[int, Refusal]] = []
        self._after: list[Outgoing] = []
        self._failed: Batch | None = None

    def __bool__(self) -> bool:
        return bool(self._now or self._refusals or self._after or self._failed)

    def entries(self, writes: Iterable[Write]) -> None:
        self._now.extend(map(_changelog, writes))

    def letter(self, letter: Outgoing) -> None:
        self._now.append(letter)

    def effects(self, effects: Effects) -> None:
        """All of it but the table's own memory."""
        self._now.extend(map(_changelog, effects.writes))
        self._now.extend(
            outgoing(reward, source=SOURCE, time_us=reward.scored_us) for reward in effects.rewards
        )
        self._refusals.extend(effects.refusals)
        self._after.extend(map(_changelog, effects.after))

    def take(self) -> Batch:
        """What is to be delivered next: first what failed before, together with all that came since."""
        batch = Batch(self._now, self._refusals, self._after)
        failed, self._failed = self._failed, None
        if failed is not None:
            batch = Batch(
                failed.now + batch.now, failed.refusals + batch.refusals, failed.after + batch.after
            )
        self._now, self._refusals, self._after = [], [], []
        return batch

    def give_back(self, batch: Batch) -> None:
        """A batch that was not delivered, or only in part: it is delivered again, before anything newer."""
        self._failed = batch

    def deliver(self, batch: Batch) -> None:
        """Returns when all is durable. Raises `LogError`; then nothing, a part or all of it may be."""
        now = batch.now
        if batch.refusals:
            now = now + self._letters(batch.refusals)
        if now:
            self._writer.write(now)
        if batch.after:
            self._writer.write(batch.after)


class Batch:
    """What is delivered together."""

    __slots__ = ("after", "now", "refusals")

    def __init__(
        self, now: list[Outgoing], refusals: list[tuple[int, Refusal]], after: list[Outgoing]
    ) -> None:
        self.now = now
        self.refusals = refusals
        self.after = after

    def __bool__(self) -> bool:
        return bool(self.now or self.refusals or self.after)


def _changelog(write: Write) -> Outgoing:
    return Outgoing(CHANGELOG, write.key, write.value, (), write.partition)
