"""What a person sees of a bounce: a line for each fault, a bar, a table at the end; and its figures."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from statistics import median
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rollwire.ops.chaos.bounce import Outcome, Page
from rollwire.ops.chaos.strike import Hit
from rollwire.ops.chaos.verdict import WHATS, Totals, Verdict, expected_totals
from rollwire.ops.figures import Figure
from rollwire.ops.ledger_figures import ledger_figures

SHOWN: Final = 20  # findings that are printed of each reader


class Lines(Page):
    """Lines, and on a terminal a bar below them."""

    def __init__(self, console: Console, bar: Progress | None) -> None:
        self._console = console
        self._bar = bar
        self._task = None if bar is None else bar.add_task("", total=None)

    def phase(self, text: str) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=text)
        else:
            self._console.print(f"{_now()}  {text}")

    def hit(self, hit: Hit, share: float) -> None:
        late = "  LATE: law 8 gives 10 s" if hit.late else ""
        self._console.print(
            f"{_now()}  fault {hit.fault.number:>2} at {share:>4.0%}  {hit.fault.how:<8} {hit.fault.whom:<11} "
            f"{hit.seconds:5.1f} s  {hit.note}{late}",
            soft_wrap=True,
        )

    def say(self, text: str) -> None:
        self._console.print(f"{_now()}  {text}", soft_wrap=True)

    def progress(self, steps: int, of: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=steps, total=of)


@contextmanager
def open_page(*, plain: bool) -> Iterator[Page]:
    console = console_of()
    if plain or not console.is_terminal:
        yield Lines(console, None)
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as bar:
        yield Lines(bar.console, bar)


def console_of() -> Console:
    """Into a pipe a line is never cut: it goes on to grep or awk."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def print_outcome(outcome: Outcome) -> None:
    console = console_of()
    console.print(faults_table(outcome))
    console.print(verdict_table(outcome))
    for name, verdict in (("during", outcome.during), ("after", outcome.after)):
        if verdict is not None and verdict.findings:
            console.print(f"the reader {name}:")
            for finding in verdict.findings[:SHOWN]:
                console.print(f"  {finding.what}: {finding.text}")
            if len(verdict.findings) > SHOWN:
                console.print(f"  and {len(verdict.findings) - SHOWN} more")
    if outcome.ledger is not None:
        for line in outcome.ledger.lines:
            if line.gap:
                ids = ", ".join((*line.missing_ids, *line.extra_ids))
                console.print(f"the ledger of {line.topic} has a gap of {line.gap}: {ids}")
    for flow in () if outcome.hours is None else outcome.hours.flows:
        if flow.lost or flow.unstarted:
            console.print(
                f"{flow.flow} of {flow.hour}: {flow.lost} neither closed nor open, {flow.unstarted} closed and never started"
            )
    for text in outcome.unreadable:
        console.print(text, soft_wrap=True)
    for stop in outcome.stops:
        if stop.late:
            console.print(f"{stop.name} did not stop within 10 s")
    if outcome.ok:
        console.print(
            f"ok: {len(outcome.hits)} faults, {outcome.known.rollouts:,} rollouts: nothing lost, repeated or torn"
        )
        if outcome.options.keep:
            console.print(f"logs and settings are in {outcome.folder}")
    else:
        console.print(f"FAILED; logs and settings are kept in {outcome.folder}")


def faults_table(outcome: Outcome) -> Table:
    """One row for each way of hitting someone."""
    table = Table(box=None, pad_edge=False, title="faults", title_justify="left")
    for column in (
        "whom",
        "how",
        "faults",
        "seconds (median)",
        "longest",
        "next version after (median)",
        "longest",
    ):
        table.add_column(column, justify="left" if column in ("whom", "how") else "right")
    kinds = sorted({(hit.fault.whom, hit.fault.how) for hit in outcome.hits})
    for whom, how in kinds:
        hits = [hit for hit in outcome.hits if (hit.fault.whom, hit.fault.how) == (whom, how)]
        took = [hit.seconds for hit in hits]
        waits = [outcome.recovered[h.fault.number] for h in hits if h.fault.number in outcome.recovered]
        table.add_row(
            whom,
            how,
            str(len(hits)),
            f"{median(took):.1f}",
            f"{max(took):.1f}",
            f"{median(waits):.1f} s" if waits else "",
            f"{max(waits):.1f} s" if waits else "",
        )
    return table


def verdict_table(outcome: Outcome) -> Table:
    """What was expected, what each reader saw, and what is wrong with it."""
    table = Table(box=None, pad_edge=False, title="verdict", title_justify="left")
    table.add_column("")
    for column in ("expected", "reader during", "reader after"):
        table.add_column(column, justify="right")
    verdicts = (outcome.during, outcome.after)
    expected = expected_totals(outcome.known)
    for name in Totals._fields:
        seen = ["" if verdict is None else f"{getattr(verdict.totals, name):,}" for verdict in verdicts]
        at_least = ">= " if name == "letters" else ""
        table.add_row(name.replace("_", " "), f"{at_least}{getattr(expected, name):,}", *seen)
    for what in WHATS:
        table.add_row(
            what, "0", *("" if verdict is None else str(verdict.number(what)) for verdict in verdicts)
        )
    table.add_row("ledger gap", "0", "", "" if outcome.ledger is None else str(outcome.ledger.gap))
    table.add_row("stops above 10 s", "0", str(outcome.late_stops), "")
    table.add_row("ended by themselves", "", str(len(outcome.deaths)), "")
    return table


def figures(outcome: Outcome) -> list[Figure]:
    """`bounce.lost` and so on are the sums over both readers, and missing where one of them could not be judged; `.during`
    and `.after` are each one's.
    """
    found: list[Figure] = []
    verdicts: dict[str, Verdict] = {
        name: verdict
        for name, verdict in (("during", outcome.during), ("after", outcome.after))
        if verdict is not None
    }
    for what in WHATS:
        numbers = {name: verdict.number(what) for name, verdict in verdicts.items()}
        if len(numbers) == 2:
            found.append(_count(f"bounce.{what}", sum(numbers.values())))
        found += [_count(f"bounce.{what}.{name}", number) for name, number in numbers.items()]
    waits = list(outcome.recovered.values())
    found += [
        _count("bounce.faults", len(outcome.hits)),
        _count("bounce.rollouts", outcome.known.rollouts),
        _count("bounce.groups", len(outcome.known.groups)),
        _count("bounce.steps", outcome.known.steps),
        _count("bounce.late_stops", outcome.late_stops),
        _count("bounce.deaths", len(outcome.deaths)),
        _count("bounce.unreadable", len(outcome.unreadable)),
        Figure(name="bounce.seconds", value=outcome.seconds, unit="s"),
    ]
    if outcome.ledger is not None:
        found.append(_count("bounce.ledger_gap", outcome.ledger.gap))
    if outcome.hours is not None:
        found += ledger_figures(outcome.hours)
    if waits:
        found.append(Figure(name="bounce.next_version_s", value=median(waits), unit="s"))
        found.append(Figure(name="bounce.next_version_max_s", value=max(waits), unit="s"))
    return found


def _count(name: str, value: int) -> Figure:
    return Figure(name=name, value=float(value), unit="1")


def _now() -> str:
    return datetime.now(UTC).strftime("%H:%M:%S")
