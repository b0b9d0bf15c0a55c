"""Runs pyright over the library and the tests and proves that it looked at all of them.

pyright does not descend into a linked folder below an included one; it would check three files and report nothing.
So the number of files it says it has analysed has to be the number that are there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("schemas", "kernels", "streams", "producers", "consumers", "ops")
_DEADLINE_S = 600.0


def expected_files(root: Path) -> int:
    """How many Python files there are to check."""
    return 1 + sum(len(list((root / folder).rglob("*.py"))) for folder in (*ROOMS, "tests"))


def main() -> int:
    expected = expected_files(ROOT)
    command = [str(Path(sys.executable).with_name("pyright")), "--outputjson"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    try:
        report = json.loads(done.stdout)
    except json.JSONDecodeError:
        sys.stderr.write(done.stdout + done.stderr)
        return done.returncode or 1
    for found in report["generalDiagnostics"]:
        start = found["range"]["start"]
        path = Path(found["file"]).relative_to(ROOT)
        print(f"{path}:{start['line'] + 1}:{start['character'] + 1}: {found['severity']}: {found['message']}")
    summary = report["summary"]
    print(f"pyright: {summary['errorCount']} errors in {summary['filesAnalyzed']} files")
    if summary["filesAnalyzed"] < expected:
        print(
            f"pyright looked at {summary['filesAnalyzed']} files of {expected}: see tool.pyright.include in pyproject.toml"
        )
        return 1
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
