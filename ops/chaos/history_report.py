"""What a history run came to, for people."""

from __future__ import annotations

import sys
from collections import Counter

from rich.console import Console
from rich.table import Table

from rollwire.ops.chaos.history import Judged, Outcome
from rollwire.ops.chaos.history_check import NAMES, count

_SHOWN = 20  # findings in words


def print_outcome(outcome: Outcome) -> None:
    """A table of both histories by name, the findings of the first in words, and the verdict."""
    # Into a pipe a table is never cut: it goes on to grep or awk.
    out = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)
    for finding in outcome.main.findings[:_SHOWN]:
        out.print(f"{finding.name}: {finding.text}")
    if len(outcome.main.findings) > _SHOWN:
        out.print(f"... and {len(outcome.main.findings) - _SHOWN} more")
    for sentence in (*outcome.main.unfinished, *outcome.control.unfinished):
        out.print(f"unfinished: {sentence}")
    out.print(_table(outcome.main, outcome.control))
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(Counter(outcome.faults).items()))
    out.print(
        f"{outcome.main.ops:,} operations, {outcome.main.transactions:,} of them transactions; "
        f"{len(outcome.faults)} faults ({kinds}); {outcome.main.errors} errors"
    )
    out.print(
        f"control: a producer used again after its EndTxn timed out; {outcome.red} of {outcome.rounds} rounds are red, "
        f"{len(outcome.control.findings)} errors"
    )
    if not outcome.ok:
        out.print(f"NOT AS IT SHOULD BE; books and logs: {outcome.folder}")


def _table(main: Judged, control: Judged) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("what")
    table.add_column("run", justify="right")
    table.add_column("control", justify="right")
    ours, theirs = count(main.findings), count(control.findings)
    for name in NAMES:
        table.add_row(name, str(ours[name]), str(theirs[name]))
    table.add_row("unfinished", str(len(main.unfinished)), str(len(control.unfinished)))
    return table
