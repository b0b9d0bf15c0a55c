"""The monitor's page: one frozen record, and the pure fold that keeps it. No I/O.

Folding is idempotent where an event can say so itself (versions, steps, evaluations, statuses are kept by their natural
keys); counts are not, so the caller folds each record of the log once (`rollwire.streams.monitor.state`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from rollwire.schemas.records import (
    Coverage,
    DeadLetter,
    Evaluation,
    Event,
    FleetStatus,
    GroupFate,
    LagCount,
    MismatchBy,
    Notice,
    TrainStep,
    WeightVersion,
)

SERIES_MAX: Final = 5_000  # points of a curve; the oldest leave first
NOTICES: Final = 20  # the last notices
RECENT: Final = 256  # pauses and delta sizes that medians are taken over


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the page's records."""


class Point(_Row, frozen=True, kw_only=True):
    """One evaluation: scores of one version on one suite, measured by one replica."""

    suite: str
    version: int
    scores: dict[str, float]  # "accuracy": 0 to 1
    tasks: int
    samples_per_task: int
    replica: str
    at_us: int


class StepPoint(_Row, frozen=True, kw_only=True):
    """One training step. A value that is not finite is None."""

    step: int
    reward_mean: float | None
    loss: float | None
    entropy: float | None
    grad_norm: float | None
    max_lag: int
    mismatch_p50: float | None  # |log pi - log mu|, all trained tokens
    mismatch_p99: float | None
    same_version_p50: float | None  # of tokens of lag 0 alone
    same_version_p99: float | None
    no_replay_p99: float | None  # with the router free; None = not measured at this step
    tokens_per_s: float | None
    duration_ms: float | None


class Served(_Row, frozen=True, kw_only=True):
    """What a replica last said."""

    fleet: str
    replica: str
    state: str
    version: int
    wanted_version: int
    state_digest: str
    pause_ms: float
    open_rollouts: int
    reason: str
    at_us: int


class FateCount(_Row, frozen=True, kw_only=True):
    decided_by: str
    fate: str
    reason: str
    groups: int


class LetterCount(_Row, frozen=True, kw_only=True):
    topic: str
    reason: str
    events: int


class Told(_Row, frozen=True, kw_only=True):
    """A notice."""

    name: str
    severity: str
    text: str
    at_us: int


class Rate(_Row, frozen=True, kw_only=True):
    """From end offsets: transaction markers count too."""

    topic: str
    end: int  # sum of the end offsets of all partitions
    per_s: float


class Page(_Row, frozen=True, kw_only=True):
    """What is to be seen of a run."""

    lineage: str = ""
    steps_done: int = 0  # the highest step of `train-steps`
    latest_version: int = -1
    latest_digest: str = ""
    published_us: int = 0  # when the latest version was published
    evaluations: tuple[Point, ...] = ()  # by suite, version
    steps: tuple[StepPoint, ...] = ()  # by step
    served: dict[str, Served] = {}  # by replica
    lag_histogram: tuple[LagCount, ...] = ()  # trained tokens of the last step, by lag in versions
    lag_max: int = 0  # of the last step
    lag_max_ever: int = 0
    mismatch: tuple[MismatchBy, ...] = ()  # of the last step, by environment, fleet and version
    coverage: tuple[
        Coverage, ...
    ] = ()  # of the last step's answers of live traffic, by outcome; () = it had none
    notices: tuple[Told, ...] = ()  # the last `NOTICES`, newest first
    fates: tuple[FateCount, ...] = ()  # most frequent first
    dead_letters: tuple[LetterCount, ...] = ()  # most frequent first
    full_bytes: int = 0  # of the latest version
    delta_pct: float | None = None  # the latest delta against the full size
    delta_pct_p50: float | None = None  # over the last `RECENT` deltas
    deltas: tuple[float, ...] = ()  # per cent, the last `RECENT`
    pause_ms_p50: float | None = None  # over the last `RECENT` swaps
    pauses: tuple[float, ...] = ()
    tokens_per_s: float | None = None  # of the last step
    trained_tokens: int = 0  # over all steps
    rates: tuple[Rate, ...] = ()  # by topic
    updated_us: int = 0

    def latest(self, suite: str) -> Point | None:
        """The evaluation of the newest version on `suite`."""
        return max((p for p in self.evaluations if p.suite == suite), key=lambda p: p.version, default=None)


def fold(page: Page, event: Event, at_us: int) -> Page:
    """The page after `event`, which was taken in at `at_us`. Events that the page does not show change nothing."""
    match event:
        case TrainStep():
            changed = _step(page, event)
        case WeightVersion():
            changed = _version(page, event)
        case FleetStatus():
            changed = _status(page, event)
        case Evaluation() if event.promotion is None:
            changed = _evaluation(page, event)
        case Notice():
            changed = _notice(page, event)
        case GroupFate():
            changed = msgspec.structs.replace(page, fates=_count_fate(page.fates, event))
        case DeadLetter():
            changed = msgspec.structs.replace(page, dead_letters=_count_letter(page.dead_letters, event))
        case _:
            return page
    return msgspec.structs.replace(changed, updated_us=at_us)


def with_rates(
    page: Page, before: Mapping[str, int], now: Mapping[str, int], seconds: float, at_us: int
) -> Page:
    """The page with events per second by topic, from sums of end offsets that were read `seconds` apart."""
    rates = tuple(
        Rate(
            topic=topic, end=end, per_s=max(0, end - before.get(topic, end)) / seconds if seconds > 0 else 0.0
        )
        for topic, end in sorted(now.items())
    )
    return msgspec.structs.replace(page, rates=rates, updated_us=at_us)


def to_json(page: Page) -> bytes:
    return msgspec.json.encode(page)


def from_json(data: bytes) -> Page:
    """Raises `msgspec.ValidationError` for anything but a page."""
    return msgspec.json.decode(data, type=Page)


def _step(page: Page, event: TrainStep) -> Page:
    if event.groups == 0:  # a revert: it trained on nothing and measured nothing
        return msgspec.structs.replace(
            page, steps_done=max(page.steps_done, event.step), lineage=event.lineage
        )
    mismatch, same, free = event.mismatch, event.mismatch_same_version, event.mismatch_no_replay
    point = StepPoint(
        step=event.step,
        reward_mean=_finite(event.reward_mean),
        loss=_finite(event.loss),
        entropy=_finite(event.entropy),
        grad_norm=_finite(event.grad_norm),
        max_lag=event.max_lag,
        mismatch_p50=_finite(mismatch.p50),
        mismatch_p99=_finite(mismatch.p99),
        same_version_p50=None if same is None else _finite(same.p50),
        same_version_p99=None if same is None else _finite(same.p99),
        no_replay_p99=None if free is None else _finite(free.p99),
        tokens_per_s=_finite(event.tokens_per_s),
        duration_ms=_finite(event.duration_ms),
    )
    seen = any(old.step == event.step for old in page.steps)
    page = msgspec.structs.replace(
        page,
        steps=_keep(page.steps, point, lambda old: old.step),
        lag_max_ever=max(page.lag_max_ever, event.max_lag),
        trained_tokens=page.trained_tokens + (0 if seen else event.trained_tokens),
    )
    if event.step < page.steps_done:
        return page
    return msgspec.structs.replace(
        page,
        steps_done=event.step,
        lineage=event.lineage,
        lag_histogram=event.lag_histogram,
        coverage=event.coverage,
        lag_max=event.max_lag,
        mismatch=event.mismatch_by,
        tokens_per_s=point.tokens_per_s,
    )


def _version(page: Page, event: WeightVersion) -> Page:
    if event.version <= page.latest_version:
        return page
    page = msgspec.structs.replace(
        page,
        lineage=event.lineage,
        latest_version=event.version,
        latest_digest=event.state_digest,
        published_us=event.published_us,
        full_bytes=event.full_bytes,
    )
    if event.kind != "delta" or not event.full_bytes:
        return page
    percent = 100.0 * event.stored_bytes / event.full_bytes
    deltas = (*page.deltas, percent)[-RECENT:]
    return msgspec.structs.replace(
        page, delta_pct=percent, deltas=deltas, delta_pct_p50=statistics.median(deltas)
    )


def _status(page: Page, event: FleetStatus) -> Page:
    known = page.served.get(event.replica)
    if known is not None and (known.at_us, known.state) == (event.at_us, event.state):
        return page
    if event.state == "swapped":
        pauses = (*page.pauses, event.pause_ms)[-RECENT:]
        page = msgspec.structs.replace(page, pauses=pauses, pause_ms_p50=statistics.median(pauses))
    if known is not None and event.at_us < known.at_us:
        return page
    served = Served(
        fleet=event.fleet,
        replica=event.replica,
        state=event.state,
        version=event.version,
        wanted_version=event.wanted_version,
        state_digest=event.state_digest,
        pause_ms=event.pause_ms,
        open_rollouts=event.open_rollouts,
        reason=event.reason,
        at_us=event.at_us,
    )
    return msgspec.structs.replace(page, served={**page.served, event.replica: served})


def _evaluation(page: Page, event: Evaluation) -> Page:
    point = Point(
        suite=event.suite,
        version=event.version,
        scores={score.name: score.value for score in event.scores},
        tasks=event.tasks,
        samples_per_task=event.samples_per_task,
        replica=event.replica,
        at_us=event.at_us,
    )
    known = next((p for p in page.evaluations if (p.suite, p.version) == (event.suite, event.version)), None)
    # The more tasks, the surer; of equals the later.
    if known is not None and (known.tasks, known.at_us) > (event.tasks, event.at_us):
        return page
    return msgspec.structs.replace(
        page, evaluations=_keep(page.evaluations, point, lambda old: (old.suite, old.version))
    )


def _notice(page: Page, event: Notice) -> Page:
    told = Told(name=event.name, severity=event.severity, text=event.text, at_us=event.at_us)
    if told in page.notices:
        return page
    ordered = sorted((told, *page.notices), key=lambda one: -one.at_us)
    return msgspec.structs.replace(page, notices=tuple(ordered[:NOTICES]))


def _count_fate(fates: tuple[FateCount, ...], event: GroupFate) -> tuple[FateCount, ...]:
    counts = {(f.decided_by, f.fate, f.reason): f.groups for f in fates}
    key = (event.decided_by, event.fate, event.reason)
    counts[key] = counts.get(key, 0) + 1
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return tuple(
        FateCount(decided_by=by, fate=fate, reason=reason, groups=n) for (by, fate, reason), n in ordered
    )


def _count_letter(letters: tuple[LetterCount, ...], event: DeadLetter) -> tuple[LetterCount, ...]:
    counts = {(letter.topic, letter.reason): letter.events for letter in letters}
    key = (event.source.topic, event.reason)
    counts[key] = counts.get(key, 0) + 1
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return tuple(LetterCount(topic=topic, reason=reason, events=n) for (topic, reason), n in ordered)


_P = TypeVar("_P", bound=_Row)


def _keep(points: tuple[_P, ...], point: _P, key: Callable[[_P], Any]) -> tuple[_P, ...]:
    """Points in the order of their keys, one a key: the new one replaces. The usual case, the last, is quick."""
    if not points or key(points[-1]) < key(point):
        return (*points, point)[-SERIES_MAX:]
    return tuple(sorted([*(old for old in points if key(old) != key(point)), point], key=key))[-SERIES_MAX:]


def _finite(value: float) -> float | None:
    """None for what JSON has no number for."""
    return value if math.isfinite(value) else None
