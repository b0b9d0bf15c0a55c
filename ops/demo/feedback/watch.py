"""Follows a feedback run live, from the topics: likes, coverage, cycle time, versions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from rollwire.ops.demo.feedback.tally import TOPICS, FeedbackTally
from rollwire.ops.demo.page import Row, Shown, percent, sparkline
from rollwire.ops.settings import RunSettings
from rollwire.schemas.errors import Refused
from rollwire.schemas.records import TrainStep
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.keys import KeyStore
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.places import partitions_of

LIKES_OF: Final = 400  # answers that a share of likes is taken over
_SHOWN_EVERY_S: Final = 1.0


class FeedbackWatch:
    """A reader of its own: it believes the topics, not the processes."""

    def __init__(self, log: Log, settings: RunSettings, keys: KeyStore) -> None:
        self._settings = settings
        self._reader = log.reader()
        partitions = partitions_of(log, TOPICS)
        self._reader.assign(log.beginning_offsets(partitions))
        self.tally = FeedbackTally(keys, settings.lineage, settings.serving.replica)
        self._history: list[float] = []
        self._first: float | None = None
        self._shown: Shown | None = None
        self._next_s = 0.0

    @property
    def steps(self) -> Mapping[int, TrainStep]:
        return self.tally.steps

    def poll(self) -> None:
        """Takes in what has come; does not wait long."""
        while records := self._reader.poll(2_000, 0.02):
            for record in records:
                try:
                    self.tally.add(decode_record(record))
                except Refused:
                    continue  # it has its dead letter; a page must not end by it
            if time.monotonic() > self._next_s:
                return

    def progress(self) -> tuple[int, int, int]:
        """Grows while the run moves. Questions alone are no progress until the last version answers them."""
        tally = self.tally
        return len(tally.steps), len(tally.swaps), len(tally.answers) if self.trained() else 0

    @property
    def served(self) -> int:
        """The version that people are answered with; -1 = none yet."""
        return -1 if self.tally.served is None else self.tally.served.version

    def trained(self) -> bool:
        """Whether all steps are taken and people are answered with the last version."""
        return self._settings.steps in self.steps and self.served >= self._settings.steps

    def answers_of(self, version: int) -> int:
        return sum(answer.version >= version for answer in self.tally.answers.values())

    def rewarded(self) -> bool:
        """Whether every answer has its reward."""
        return len(self.tally.rewards) >= len(self.tally.answers)

    def describe(self) -> str:
        tally = self.tally
        return (
            f"step {max(tally.steps, default=0)} of {self._settings.steps}, {len(tally.answers)} answers, "
            f"{len(tally.rewards)} rewards, version {self.served} served"
        )

    def shown(self) -> Shown:
        now = time.monotonic()
        if self._shown is None or now > self._next_s:
            self._next_s = now + _SHOWN_EVERY_S
            self._shown = self._show()
        return self._shown

    def _show(self) -> Shown:
        tally = self.tally
        likes = tally.recent_likes(LIKES_OF)
        if likes is not None:
            self._history.append(likes)
            if self._first is None and len(tally.answers) >= LIKES_OF:
                self._first = likes
        cycles = tally.cycles_s()
        cycle = f"{cycles[len(cycles) // 2]:.1f} s" if cycles else "–"
        coverage = tally.coverage()
        covered = ", ".join(f"{name} {100 * s / n:.0f} %" for name, (n, s) in coverage.items() if n)
        was = "" if self._first is None else f", {percent(self._first)} at the start"
        rows = (
            Row(
                "answers people like",
                f"{percent(likes)} of the last {LIKES_OF}{was}",
                sparkline(self._history),
            ),
            Row(
                "clicks",
                f"{len(tally.clicks):,} on {len(tally.first_click_us):,} of {len(tally.answers):,} answers",
            ),
            Row("coverage", covered or "–"),
            Row("click to served", f"{cycle} (median); {len({v for _, v in tally.swaps})} versions served"),
        )
        return Shown(
            f"likes {percent(likes)} · {len(tally.clicks):,} clicks · serves {self.served} · cycle {cycle}",
            rows,
        )

    def close(self) -> None:
        self._reader.close()
