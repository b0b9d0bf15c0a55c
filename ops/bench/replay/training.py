"""A demo run whose every version is made again by training: how many of them come out bit for bit as published."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from rollwire.ops.demo.supervisor import child_environment, rollwire_command
from rollwire.ops.stack import running_stack
from rollwire.schemas.errors import DeadlineExceeded, LogError

# A smaller warm start and smaller steps than the demo's: here it need not learn, its steps need be taken.
_SMALL: Final = (
    "warm_start.steps=40",
    "warm_start.demonstrations=4000",
    "pack.groups_per_step=8",
    "fleet.max_open_groups=24",
    "trainer.checkpoint_every=10",
)
_DEMO_S: Final = 600.0
_AUDIT_S: Final = 300.0


class Trained(NamedTuple):
    equal: int  # versions that came out bit for bit as published
    versions: int  # that steps made


class _Answer(msgspec.Struct):
    results: dict[str, float]


def trained_again(folder: Path, *, steps: int, told: Callable[[str], None]) -> Trained:
    """Runs a demo of `steps` steps in `folder`, then `rollwire audit rebuild --all --via training` over it.

    Raises `LogError` where one of them could not run, `DeadlineExceeded` where it took too long.
    """
    told(f"running a demo of {steps} steps")
    sets = [part for value in _SMALL for part in ("--set", value)]
    _run(("demo", "--plain", "--dir", str(folder), "--steps", str(steps), *sets), (0, 1), _DEMO_S)
    told("training its versions again")
    answer = folder / "rebuild.json"
    with running_stack(folder):
        audit = (
            "audit",
            "rebuild",
            "--all",
            "--via",
            "training",
            "--dir",
            str(folder),
            "--json",
            str(answer),
        )
        _run(audit, (0, 1), _AUDIT_S)
    found = msgspec.json.decode(answer.read_bytes(), type=_Answer).results
    return Trained(int(found["rebuild.training_equal"]), int(found["rebuild.versions"]))


def _run(arguments: tuple[str, ...], codes: tuple[int, ...], limit_s: float) -> None:
    """`codes`: exit codes of a command that ran. A demo this small may miss what a demo is judged by."""
    command = [*rollwire_command(), *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=limit_s,
            env=child_environment(os.environ) | {"OMP_NUM_THREADS": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        raise DeadlineExceeded(f"`rollwire {' '.join(arguments)}` took more than {limit_s:g} s") from expired
    if done.returncode not in codes:
        raise LogError(
            f"`rollwire {' '.join(arguments)}` ended with {done.returncode}: {done.stdout[-2_000:]}{done.stderr[-2_000:]}"
        )
