"""The browser script as it is shipped; what it does is tried in a real browser (tests/system/test_feedback_live.py)."""

from __future__ import annotations

import gzip
import re
import subprocess
from importlib import resources

import pytest

from rollwire.ops.programs import find_node

FOLDER = resources.files("rollwire.producers.gateway") / "browser"
SCRIPT = (FOLDER / "feedback.js").read_bytes()
TYPES = (FOLDER / "feedback.d.ts").read_text("utf-8")


def test_it_is_below_3_kb_zipped() -> None:
    assert len(gzip.compress(SCRIPT, 9)) < 3_000


def test_it_needs_nothing_else() -> None:
    assert not re.search(rb"\b(import|require|eval)\b\s*[('\"{]", SCRIPT)
    assert re.findall(rb"https?://[a-z]", SCRIPT) == []


def test_it_parses() -> None:
    done = subprocess.run(
        [find_node().node, "--check", "-"], input=SCRIPT, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("name", ["send", "push", "create", "flush", "pending"])
def test_what_it_offers_is_typed(name: str) -> None:
    offered = re.findall(rb"return \{ (send, .*) \};", SCRIPT)
    assert len(offered) == 1
    assert re.search(rb"\b%b\b" % name.encode(), offered[0])
    assert re.search(rf"^  (readonly )?{name}[(:]", TYPES, re.MULTILINE)
