"""Where a run lives: `<dir>/runs/<number>-<kind>`, newest last."""

from __future__ import annotations

import re
from pathlib import Path

from rollwire.ops.settings import RUN_FILE
from rollwire.schemas.errors import EnvironmentMissing

_NAME = re.compile(r"(\d{4})-[a-z]+")


def runs(stack_dir: Path) -> list[Path]:
    """The runs under `stack_dir`, oldest first."""
    found = (stack_dir / "runs").glob("*")
    return sorted(p for p in found if _NAME.fullmatch(p.name) and (p / RUN_FILE).exists())


def latest_run(stack_dir: Path) -> Path:
    """Raises `EnvironmentMissing` where there is none."""
    listed = runs(stack_dir)
    if not listed:
        raise EnvironmentMissing(f"there is no run in {stack_dir}: `rollwire demo` begins one")
    return listed[-1]


def new_run(stack_dir: Path, kind: str) -> Path:
    """A folder for a new run; `kind` is a word of a to z."""
    taken = [int(p.name[:4]) for p in (stack_dir / "runs").glob("*") if _NAME.fullmatch(p.name)]
    folder = stack_dir / "runs" / f"{max(taken, default=0) + 1:04d}-{kind}"
    folder.mkdir(parents=True)
    return folder
