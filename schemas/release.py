"""Which code wrote an event: the release, and the commit where it runs from a working tree."""

from __future__ import annotations

import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

_GIT_S: Final = 10.0


@cache
def code_version() -> str:
    """ "0.1.0"; from a working tree "0.1.0+g1a5c5d3b90ff", with ".changed" behind it where tracked files differ.

    Asked once a process: code that was imported does not change with its files.
    """
    try:
        release = version("rollwire")
    except PackageNotFoundError:  # run from its folder, not installed
        release = "0"
    # A copy that was installed into a folder of somebody else's repository is not of that repository's commit.
    commit = commit_of(Path(__file__).resolve().parents[1])
    return release if commit is None else f"{release}+{commit}"


def commit_of(root: Path) -> str | None:
    """Of the working tree whose root is `root`; None where it is none, or git is not there to ask."""
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"g{head}.changed" if changed else f"g{head}"


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=_GIT_S, check=True
    )
    return done.stdout.strip()
