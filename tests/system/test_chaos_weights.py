"""The crash matrix on the real broker and S3 server, in its short form: some cells of every part."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rollwire.ops.cli import run
from rollwire.ops.stack import StackInfo

pytestmark = pytest.mark.system

PARTS = {
    "publish",
    "follow",
    "publish_context",
    "publish_again",
    "collect",
    "serve_numpy",
    "serve_slice",
    "serve_folder",
    "serve_again_folder",
    "kill_9_folder",
    "kill_9_publish",
    "input_publish",
    "input_serve",
    "store",
    "store_up",
    "store_down",
}


def test_c23_c24_c26_c34_deaths_and_broken_words_on_the_real_services(
    stack: StackInfo, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """C23, C24, C26, C34, T4: every cell is bit-equal or untouched, and goes on by itself."""
    file = tmp_path / "crash.json"
    code = run(
        ["chaos", "weights", "--dir", str(stack.dir), "--every", "97", "--kills", "3", "--json", str(file)]
    )
    printed = capfd.readouterr().out
    assert code == 0, printed
    figures = {f["name"]: f["value"] for f in msgspec.json.decode(file.read_bytes())["results"]}
    assert figures["crash.failed"] == 0
    assert figures["crash.cells"] >= 20
    assert all(figures[f"crash.cells.{part}"] >= 1 for part in PARTS)
    assert "cells in" in printed
