"""The edge of every `rollwire audit` command: how a report is printed and written, and what the exit code says.

0   clean
1   findings
2   the audit could not run: no broker, no store, a wrong option, or a fault of ours
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter
from rich.text import Text

from rollwire.ops.memory import tune_memory
from rollwire.ops.printing import console, table, write_json
from rollwire.schemas.errors import RollwireError
from rollwire.streams.findings import MEANING, Report

COULD_NOT_RUN: Final = 2
_SHOWN: Final = 50  # findings that are printed; the JSON has all

JsonFile = Annotated[Path | None, Parameter(name="--json", help="Write the answer there as JSON.")]


# Once a process: an audit holds records by the thousand, as every process of a run does.
_tuned = cache(tune_memory)


@contextmanager
def auditing() -> Iterator[None]:
    """Whatever ends an audit before its end is exit code 2, never 1: 1 says that it ran, and found something."""
    _tuned()
    try:
        yield
    except RollwireError as error:
        sys.stderr.write(f"rollwire: the audit could not run: {error}\n")
        raise SystemExit(COULD_NOT_RUN) from error
    except Exception as error:
        traceback.print_exc()
        raise SystemExit(COULD_NOT_RUN) from error


def conclude(report: Report, json: Path | None = None) -> int:
    """Prints a report, writes it where asked, and returns the exit code."""
    write_json(json, report)
    out = console()
    out.print(", ".join(f"{count:,} {name}" for name, count in report.checked.items()) or "nothing to check")
    for note in report.notes:
        out.print(f"note: {note}", markup=False)
    if not report.findings:
        out.print("clean: nothing found")
        return 0
    found = table("finding", "where", "detail")
    for finding in report.findings[:_SHOWN]:
        # What stands in events is text, whatever brackets are in it.
        found.add_row(finding.kind, Text(finding.where), Text(finding.detail))
    out.print(found)
    if len(report.findings) > _SHOWN:
        out.print(f"and {len(report.findings) - _SHOWN:,} more: --json has all")
    for kind in sorted({finding.kind for finding in report.findings}):
        out.print(f"  {kind}: {MEANING[kind]}", markup=False)
    out.print(f"{len(report.findings):,} findings")
    return report.exit_code
