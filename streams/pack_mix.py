"""Which of the waiting groups go into the next plan: so many of each kind, or a whole plan of one kind that waited. Pure."""

from __future__ import annotations

from typing import NamedTuple

from rollwire.streams.pack_queue import Entry, Waiting


class Mix(NamedTuple):
    """What a plan is made of."""

    groups: int  # of a plan
    live: int  # of them, answers of live traffic
    max_age_us: int  # of an answer
    max_wait_us: int  # of a whole plan of one kind for the other kind

    def quota(self, *, live: bool) -> int:
        return self.live if live else self.groups - self.live

    @property
    def both(self) -> bool:
        """Whether a plan has groups of both kinds."""
        return 0 < self.live < self.groups


class Chosen(NamedTuple):
    sampled: list[Entry]
    live: list[Entry]


def choose(waiting: Waiting, mix: Mix, *, now_us: int, at_end: bool, full: bool) -> Chosen | None:
    """The next plan's groups; None where it is to be waited for.

    A kind that is missing is given up for this plan where the other one fills the buffer (what is missing may stand
    behind it), or where the log was read to its end and that other kind has waited for long enough.
    """
    if all(waiting.count(live=live) >= mix.quota(live=live) for live in (False, True)):
        return Chosen(*(waiting.oldest(mix.quota(live=live), live=live) for live in (False, True)))
    for live in (False, True):
        since_us = _alone_since_us(waiting, mix, live=live)
        if since_us is not None and (full or (at_end and now_us >= since_us + mix.max_wait_us)):
            alone = waiting.oldest(mix.groups, live=live)
            return Chosen([], alone) if live else Chosen(alone, [])
    return None


def next_due_us(waiting: Waiting, mix: Mix, *, may_plan: bool) -> int | None:
    """When time alone decides something next: an answer is too old, or one kind has waited long enough for the other."""
    times: list[int] = []
    if waiting.count(live=True):
        times += [entry.opened_us + mix.max_age_us + 1 for entry in waiting if entry.live]
    if may_plan:
        for live in (False, True):
            since_us = _alone_since_us(waiting, mix, live=live)
            if since_us is not None:
                times.append(since_us + mix.max_wait_us)
    return min(times, default=None)


def _alone_since_us(waiting: Waiting, mix: Mix, *, live: bool) -> int | None:
    """In a mix: since when a kind could have made a plan alone."""
    if not mix.both or waiting.count(live=live) < mix.groups:
        return None
    return max(entry.timestamp_ms for entry in waiting.oldest(mix.groups, live=live)) * 1_000
