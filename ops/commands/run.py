"""`rollwire run`: one process of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def run(
    role: str,
    *,
    run: Annotated[Path | None, Parameter(help="folder of the run; the newest one, if not given")] = None,
    dir: Annotated[Path, Parameter(help="folder of the stack's state")] = Path(".rollwire"),
) -> None:
    """Run one process of a run until its work is done or it is told to stop.

    Parameters
    ----------
    role
        warm-start, fleet, verifier, assemble, pack, trainer, arithmetic-trainer, evaluator or monitor.
    """
    from rollwire.ops.demo.folders import latest_run
    from rollwire.ops.roles import run_role

    run_role(role, run or latest_run(dir), dir)
