"""`rollwire run`: one process of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def run(
    role: str,
    /,
    *,
    run: Annotated[Path | None, Parameter(help="Folder of the run; by default the newest one.")] = None,
    dir: Annotated[Path, Parameter(help="Folder of the stack's state.")] = Path(".rollwire"),
) -> None:
    """Run one process of a run until its work is done or it is told to stop.

    `rollwire demo` starts these, and writes the run's folder and settings. SIGTERM ends a role within 10 s; several assemble
    share the partitions out, of several pack one packs and the others stand by.

    Parameters
    ----------
    role
        warm-start, fleet, verifier, assemble, assemble-production, pack, trainer, arithmetic-trainer, evaluator, monitor, gateway or archive.
    """
    from rollwire.ops.demo.folders import latest_run
    from rollwire.ops.roles import run_role

    run_role(role, run or latest_run(dir), dir)
