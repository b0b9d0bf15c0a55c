"""`rollwire simulate`: seeds of the simulation, or one of them, told effect by effect."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, validators
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from rollwire.ops.figures import commit, write_figures

Json = Annotated[Path | None, Parameter(name="--json", help="Write the figures there, in the common form.")]
Positive = Annotated[int, Parameter(validator=validators.Number(gte=1))]
NotNegative = Annotated[int, Parameter(validator=validators.Number(gte=0))]

_SHOWN = 5  # failing seeds that are told in full
_LINES = 12  # of their last effects

if TYPE_CHECKING:
    from rollwire.ops.simulate.run import Outcome


def simulate(
    *,
    seeds: Positive = 1_000,
    first: NotNegative = 0,
    seed: int | None = None,
    jobs: Positive = 2,
    json: Json = None,
) -> int:
    """Run the processors over a log, a store and a clock in memory that lose, delay and kill; check the laws.

    A seed that breaks a law is printed with the commit, the law and its last effects, and the exit code is 1; --seed runs
    it again, effect by effect. The same commit and seed give the same history.

    Parameters
    ----------
    seeds
        How many seeds to run.
    first
        The first seed; the others follow it.
    seed
        Run this one only, and print every effect; no figures are written.
    jobs
        Processes that share the seeds out.
    """
    if seed is not None:
        return _replay(seed)
    from rollwire.ops.simulate.sweep import sweep

    began_s = time.monotonic()
    console = Console(stderr=True)
    at = commit() or "no commit"
    failed: list[Outcome] = []
    with Progress(
        TextColumn("seeds"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]} failed"),
        TimeRemainingColumn(), console=console, transient=True,
    ) as progress:  # fmt: skip
        task = progress.add_task("seeds", total=seeds, failed=0)

        def told(done: int, new: list[Outcome]) -> None:
            for outcome in new[: max(0, _SHOWN - len(failed))]:
                _tell(progress.console, at, outcome)
            failed.extend(new)
            progress.update(task, completed=done, failed=len(failed))

        tally = sweep(first, seeds, jobs=jobs, told=told)
    figures = tally.figures()
    table = Table(box=None, pad_edge=False, show_header=False)
    for figure in figures:
        known = "" if figure.baseline is None else f"of {figure.baseline:,.0f}"
        table.add_row(figure.name, f"{figure.value:,.0f}", known)
    table.add_row("effects in all", f"{tally.effects:,}", "")
    table.add_row("versions in all", f"{tally.versions:,}", "")
    table.add_row("duration", f"{time.monotonic() - began_s:.0f} s", "")
    Console().print(table)
    if tally.missed:
        console.print("nobody died at: " + ", ".join(map(str, tally.missed)), markup=False, highlight=False)
    if tally.unknown:
        console.print("not in the list of points: " + ", ".join(map(str, tally.unknown)), markup=False)
    if json is not None:
        write_figures(json, f"rollwire simulate --seeds {seeds} --first {first}", figures)
    return 1 if tally.failures or tally.unknown else 0


def _tell(console: Console, at: str, outcome: Outcome) -> None:
    console.print(f"seed {outcome.seed} at {at}: {outcome.failure}", markup=False, highlight=False)
    for line in outcome.last[-_LINES:]:
        console.print(f"    {line}", markup=False, highlight=False)
    console.print(f"    replay: rollwire simulate --seed {outcome.seed}", markup=False, highlight=False)


def _replay(seed: int) -> int:
    from rollwire.ops.simulate.run import run_seed

    console = Console(width=200)
    outcome = run_seed(seed, trace=lambda text: console.print(text, markup=False, highlight=False))
    console.print(
        f"seed {seed} at {commit() or 'no commit'}: {outcome.effects} effects, {outcome.plans} plans, "
        f"{outcome.versions} versions, history {outcome.digest[:16]}: {outcome.failure or 'all laws hold'}",
        markup=False,
        highlight=False,
    )
    return 0 if outcome.failure is None else 1
