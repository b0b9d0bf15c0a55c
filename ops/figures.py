"""The common form of figures: everything that measures writes it with `--json F`.

    {"command": ..., "commit": ..., "machine": {...}, "results": [{"name", "value", "unit", "baseline", "ratio"}]}

Names are dotted, documented where they are measured, and stable: tables and comparisons over releases follow from them.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured value. `baseline`: what it is compared with, in the same unit and from the same run."""

    name: str
    value: float
    unit: str
    baseline: float | None = None

    @property
    def ratio(self) -> float | None:
        """value / baseline; None where there is nothing to divide by."""
        return None if not self.baseline else self.value / self.baseline


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    system: str
    processor: str
    cores: int  # that this process may use
    memory_gib: float
    python: str


def machine() -> Machine:
    """This machine, as far as it tells."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gib=round(pages / 2**30, 1),
        python=platform.python_version(),
    )


def commit() -> str | None:
    """The commit that the code stands on, with "+" behind it where files differ; None outside a repository."""
    folder = Path(__file__).resolve().parent
    try:
        head = _git(folder, "rev-parse", "HEAD")
        return head + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def encode_figures(command: str, results: Sequence[Figure]) -> bytes:
    """The common form as JSON. A name that is there twice is an error of the caller's: `ValueError`."""
    names = [figure.name for figure in results]
    if len(names) != len(set(names)):
        raise ValueError(f"figures with the same name: {sorted({n for n in names if names.count(n) > 1})}")
    value = {
        "command": command,
        "commit": commit(),
        "machine": machine(),
        "results": [
            {
                "name": figure.name,
                "value": figure.value,
                "unit": figure.unit,
                "baseline": figure.baseline,
                "ratio": figure.ratio,
            }
            for figure in results
        ],
    }
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def write_figures(path: Path, command: str, results: Sequence[Figure]) -> None:
    """Writes the common form; the file is whole or not there."""
    data = encode_figures(command, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    part.replace(path)


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
