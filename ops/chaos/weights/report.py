"""What a person sees of the matrix: a line for each cell, a table of them at the end; and its figures."""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import Final

from rich.console import Console
from rich.table import Table

from rollwire.ops.chaos.report import console_of
from rollwire.ops.chaos.weights.matrix import Result
from rollwire.ops.chaos.weights.run import Outcome
from rollwire.ops.figures import Figure

_SIDES: Final = ("before ", "after ")


def print_result(console: Console, result: Result) -> None:
    verdict = f"FAILED: {result.problem}" if result.problem else "ok"
    console.print(
        f"{result.part:<17} {result.cell:<45} {result.seconds:5.1f} s  {verdict}",
        soft_wrap=True,
        markup=False,
    )
    console.file.flush()  # into a pipe, too, a line comes when its cell has ended


def print_outcome(outcome: Outcome) -> None:
    console = console_of()
    console.print(cells_table(outcome))
    for result in outcome.failed:
        console.print(f"{result.part}, {result.cell}: {result.problem}", soft_wrap=True, markup=False)
    if outcome.ok:
        console.print(
            f"ok: {len(outcome.results)} cells in {outcome.seconds:.0f} s, each bit-equal or untouched"
        )
    else:
        console.print(
            f"FAILED: {len(outcome.failed)} of {len(outcome.results)} cells; logs are in {outcome.folder}"
        )


def cells_table(outcome: Outcome) -> Table:
    """A row for each effect, fault or input, with its cells."""
    table = Table(box=None, pad_edge=False, title="cells", title_justify="left")
    for column in ("part", "what", "cells", "failed", "seconds (median)", "longest"):
        table.add_column(column, justify="left" if column in ("part", "what") else "right")
    rows: defaultdict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in outcome.results:
        rows[result.part, what_of(result.cell)].append(result)
    for (part, what), results in rows.items():
        seconds = [result.seconds for result in results]
        table.add_row(
            part,
            what,
            str(len(results)),
            str(sum(bool(result.problem) for result in results)),
            f"{median(seconds):.1f}",
            f"{max(seconds):.1f}",
        )
    return table


def what_of(cell: str) -> str:
    """The effect of a crash, or the cell's own name."""
    for side in _SIDES:
        if cell.startswith(side) and " #" in cell:
            return cell.removeprefix(side).rsplit(" #", 1)[0]
    return cell.partition(", after ")[0] if cell.startswith("at random") else cell


def figures(outcome: Outcome) -> list[Figure]:
    """`crash.cells` and `crash.failed` over all, and of each part."""
    found = [
        _count("crash.cells", len(outcome.results)),
        _count("crash.failed", len(outcome.failed)),
        Figure(name="crash.seconds", value=outcome.seconds, unit="s"),
    ]
    for part in dict.fromkeys(result.part for result in outcome.results):
        of = [result for result in outcome.results if result.part == part]
        name = part.replace(",", "").replace(" ", "_").replace("-", "")
        found.append(_count(f"crash.cells.{name}", len(of)))
        found.append(_count(f"crash.failed.{name}", sum(bool(result.problem) for result in of)))
    return found


def _count(name: str, value: int) -> Figure:
    return Figure(name=name, value=float(value), unit="1")
