"""The memory of an event process: set for it alone, and events still go when nobody holds them."""

from __future__ import annotations

import gc
import subprocess
import sys

CODE = """
import gc, resource, sys
from rollwire.ops.memory import tune_memory
if sys.argv[1] == "tuned":
    tune_memory()
def batch():
    return [b"x" * (5 << 20) for _ in range(4)]
batch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    batch()
print(gc.get_threshold()[0], resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _run(word: str) -> tuple[int, int]:
    """The threshold of the youngest generation, and the page faults of twenty batches of 5,120 pages."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", CODE, word], capture_output=True, text=True, timeout=60, check=True
    )
    threshold, faults = map(int, done.stdout.split())
    return threshold, faults


def test_freed_blocks_are_used_again_without_page_faults() -> None:
    here = gc.get_threshold()
    plain, tuned = _run("plain"), _run("tuned")
    assert tuned[0] > 10 * plain[0]
    if sys.platform.startswith("linux"):
        assert tuned[1] < 1_000 < plain[1]
    assert gc.get_threshold() == here
