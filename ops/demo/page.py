"""Draws the monitor's page for a terminal. Pure: a page and what the demo knows in, a renderable out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollwire.streams.monitor.page import Page, Point

_BLOCKS = "▁▂▃▄▅▆▇█"
HOT_TOPICS = ("rollouts", "rewards", "routing-traces", "groups", "packed-batches", "weight-versions")


class Row(NamedTuple):
    """One line of the page: what, how much, and how it went."""

    name: str
    value: str
    trend: str = ""


class Shown(NamedTuple):
    """What a run is for, where that is not accuracy on held-out tasks."""

    words: str  # for the one line
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """What the demo knows beside the page."""

    title: str
    phase: str
    environment: str
    steps: int  # to take in all
    steps_done: int
    max_lag: int
    elapsed_s: float
    left_s: float | None  # None = not known yet
    url: str | None  # where the monitor serves the page as JSON; None = not known yet
    said: tuple[str, ...]
    shown: Shown | None = None  # in place of held-out accuracy


def draw(page: Page, frame: Frame) -> Panel:
    """The whole page, about 24 lines by 100 columns; narrower terminals wrap."""
    body = Group(_progress(frame), Text(), _learning(page, frame), Text(), _flow(page, frame), *_said(frame))
    return Panel(
        body, title=f"[bold]{frame.title}[/]", title_align="left", border_style="grey50", padding=(0, 1)
    )


def line(page: Page, frame: Frame) -> str:
    """The same in one line, for `--plain` and for logs."""
    last = page.steps[-1] if page.steps else None
    held = _newest(page, frame, "heldout")
    parts = [
        f"{frame.elapsed_s:5.0f} s",
        f"step {frame.steps_done}/{frame.steps}",
        frame.shown.words
        if frame.shown is not None
        else f"held-out {percent(None if held is None else held.scores.get('accuracy'))}",
        f"reward {_number(None if last is None else last.reward_mean, '.3f')}",
        f"lag {page.lag_max}",
        f"mismatch p99 {_number(None if last is None else last.mismatch_p99, '.2g')}",
        f"delta {_number(page.delta_pct, '.1f')} %",
        f"pause {_number(page.pause_ms_p50, '.1f')} ms",
        f"{sum(r.per_s for r in page.rates):,.0f} events/s",
        f"{_clock(frame.left_s)} left" if frame.left_s is not None else frame.phase,
    ]
    return " · ".join(parts)


def sparkline(values: Sequence[float], width: int = 28) -> str:
    """The last `width` means of equal stretches of `values`, as blocks scaled from their lowest to their highest."""
    if not values:
        return ""
    per = max(1, -(-len(values) // width))
    means = [sum(values[i : i + per]) / len(values[i : i + per]) for i in range(0, len(values), per)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)


def _progress(frame: Frame) -> Table:
    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column(ratio=1)
    table.add_column(justify="right", no_wrap=True)
    left = f"{_clock(frame.left_s)} left" if frame.left_s is not None else "time left not known yet"
    table.add_row(
        ProgressBar(
            total=frame.steps, completed=frame.steps_done, complete_style="green", finished_style="green"
        ),
        f"step {frame.steps_done} of {frame.steps}",
    )
    table.add_row(Text(frame.phase, style="cyan"), f"{_clock(frame.elapsed_s)} so far, {left}")
    return table


def _learning(page: Page, frame: Frame) -> Table:
    last = page.steps[-1] if page.steps else None
    rewards = [s.reward_mean for s in page.steps if s.reward_mean is not None]
    mismatch = [s.mismatch_p99 for s in page.steps if s.mismatch_p99 is not None]
    free = next((s.no_replay_p99 for s in reversed(page.steps) if s.no_replay_p99 is not None), None)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="grey62", no_wrap=True, width=22)
    table.add_column(no_wrap=True, width=46)
    table.add_column(style="cyan", no_wrap=True)
    for row in _held_out(page, frame) if frame.shown is None else frame.shown.rows:
        table.add_row(*row)
    table.add_row(
        "reward of what trains",
        _number(None if last is None else last.reward_mean, ".3f"),
        sparkline(rewards),
    )
    table.add_row(
        "mismatch p99",
        f"{_number(None if last is None else last.mismatch_p99, '.2g')} nats, "
        f"{_number(None if last is None else last.same_version_p99, '.1g')} at lag 0, {_number(free, '.2g')} unreplayed",
        sparkline(mismatch),
    )
    lags = " ".join(f"{c.lag}:{c.tokens}" for c in page.lag_histogram)
    table.add_row(
        "lag", f"{page.lag_max} of at most {frame.max_lag} versions", f"tokens by lag {lags}" if lags else ""
    )
    if page.coverage:
        covered = ", ".join(f"{c.outcome or 'not said'} {c.signalled}/{c.rollouts}" for c in page.coverage)
        table.add_row("feedback coverage", covered)
    return table


def _held_out(page: Page, frame: Frame) -> list[Row]:
    rows: list[Row] = []
    for suite, name in (("heldout", "held-out accuracy"), ("distinct", "  distinct tasks")):
        points = _suite(page, frame, suite)
        at = f" at version {points[-1].version}" if points else ""
        was = f", {percent(points[0].scores.get('accuracy'))} at the start" if len(points) > 1 else ""
        now = percent(points[-1].scores.get("accuracy")) if points else "–"
        trend = sparkline([p.scores.get("accuracy", 0.0) for p in points])
        rows.append(Row(name, f"{now}{at}{was}", trend))
    return rows


def _flow(page: Page, frame: Frame) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="grey62", no_wrap=True, width=22)
    table.add_column()
    served = ", ".join(
        f"{s.replica} {s.version}" for s in sorted(page.served.values(), key=lambda s: s.replica)
    )
    table.add_row("version", f"{max(page.latest_version, 0)} published; serving: {served or 'nobody yet'}")
    fates = ", ".join(f"{f.groups:,} {f.fate} ({f.reason.replace('_', ' ')})" for f in page.fates)
    table.add_row("groups by fate", fates or "none yet")
    delta = "–" if page.delta_pct is None else f"{page.delta_pct:.1f} % of {page.full_bytes / 1e6:.2f} MB"
    table.add_row(
        "delta against full", f"{delta}; swap pause {_number(page.pause_ms_p50, '.1f')} ms (median)"
    )
    rates = {r.topic: r.per_s for r in page.rates}
    hot = ", ".join(f"{topic} {rates[topic]:,.0f}" for topic in HOT_TOPICS if topic in rates)
    table.add_row("events/s", f"{sum(rates.values()):,.0f}   {hot}" if rates else "–")
    letters = ", ".join(f"{d.events} {d.reason} on {d.topic}" for d in page.dead_letters)
    table.add_row("dead letters", letters or "none")
    table.add_row("this page as JSON", frame.url or "–")
    return table


def _said(frame: Frame) -> list[Text]:
    return [Text(), *(Text(said, style="yellow") for said in frame.said[-3:])] if frame.said else []


def _suite(page: Page, frame: Frame, suite: str) -> list[Point]:
    """Full and quick evaluations of one suite by version; where both exist, the full one."""
    full, quick = f"{frame.environment}.{suite}", f"{frame.environment}.{suite}.quick"
    found = {p.version: p for p in page.evaluations if p.suite == quick}
    found.update({p.version: p for p in page.evaluations if p.suite == full})
    return [found[version] for version in sorted(found)]


def _newest(page: Page, frame: Frame, suite: str) -> Point | None:
    points = _suite(page, frame, suite)
    return points[-1] if points else None


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def percent(value: float | None) -> str:
    """A share in words; a dash where it is not known."""
    return "–" if value is None else f"{100 * value:.1f} %"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
