"""A minute of coverage-guided fuzzing of the delta readers: no crash, no hang, no memory beyond bounds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# The peak memory that a process is charged with begins with that of the one it was started by, here pytest's.
BETWEEN = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
FUZZ = Path(__file__).parents[1] / "fuzz" / "delta_fuzz.py"
SECONDS = 60
INPUTS = 80_000  # the tool itself keeps some 2 to 5 kB for each, which count against the limit of memory


@pytest.mark.system
def test_c82_a_minute_of_any_bytes(tmp_path: Path) -> None:
    limits = ["-timeout=20", "-rss_limit_mb=1024", "-max_len=65536"]
    run = subprocess.run(
        [
            *(sys.executable, "-P", "-c", BETWEEN),
            *(sys.executable, "-P", str(FUZZ), "--seeds", str(tmp_path / "corpus")),
            *(f"-max_total_time={SECONDS}", f"-runs={INPUTS}", *limits),
        ],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4_000:]
    done = re.search(r"Done (\d+) runs", run.stderr)
    assert done is not None, run.stderr[-4_000:]
    # Beyond the seeds, of which there are two dozen: the inputs were mutations.
    assert int(done[1]) > 1_000
