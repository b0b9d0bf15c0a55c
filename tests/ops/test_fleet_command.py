"""`rollwire fleet`: its table, its targets, its probe, and what it refuses to be told."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from rollwire.consumers.weights.targets.folder import CURRENT, FolderTarget
from rollwire.consumers.weights.targets.numpy_state import NumpyTarget
from rollwire.ops.cli import run
from rollwire.ops.commands.fleet import draw
from rollwire.ops.fleet_table import fold
from rollwire.ops.fleet_targets import TargetName, TargetOptions, command_probe, open_target
from rollwire.schemas.errors import ConfigError, ProbeFailed
from rollwire.schemas.golden import load_examples
from rollwire.schemas.records import FleetStatus, WeightVersion

SWAPPED = next(e.event for e in load_examples("fleet-status") if e.name == "channel-swapped")
ANCHOR = next(e.event for e in load_examples("weight-versions") if e.name == "anchor")
assert isinstance(SWAPPED, FleetStatus)
assert isinstance(ANCHOR, WeightVersion)


def version(number: int, digest: str, lineage: str = "a") -> WeightVersion:
    assert isinstance(ANCHOR, WeightVersion)
    return msgspec.structs.replace(ANCHOR, version=number, state_digest=digest, lineage=lineage)


def test_the_table_shows_each_replicas_last_word_and_its_last_swap() -> None:
    assert isinstance(SWAPPED, FleetStatus)
    digest = SWAPPED.state_digest
    refused = msgspec.structs.replace(
        SWAPPED,
        state="refused",
        wanted_version=9,
        reason="ProbeFailed: no",
        at_us=SWAPPED.at_us + 1_000_000,
        pause_ms=0.0,
        fetched_bytes=0,
    )
    again = msgspec.structs.replace(SWAPPED, pause_ms=0.0, stage_ms=0.0, fetched_bytes=0)  # a day later
    other = msgspec.structs.replace(SWAPPED, replica="fleet-0", version=-1, state_digest="", state="stopped")
    events = [
        version(7, digest),
        version(9, "b"),
        version(7, "c", "b"),
        version(30, "d", "b"),
        SWAPPED,
        again,
        other,
        refused,
    ]
    rows = fold(events).rows(SWAPPED.at_us + 3_000_000)
    assert [row.replica for row in rows] == ["fleet-0", "fleet-1"]
    assert (rows[0].lag, rows[0].pause_ms, rows[0].state) == (None, 0.0, "stopped")
    row = rows[1]
    assert (row.state, row.served, row.wanted, row.lag) == ("refused", 7, 9, 2)
    assert (row.pause_ms, row.fetched_bytes, row.age_s) == (2.5, 262_144, 2.0)
    console = Console(width=200)
    with console.capture() as shown:
        console.print(draw(rows))
    assert "fleet/fleet-1" in shown.get()
    assert "ProbeFailed: no" in shown.get()
    assert "262,144" in shown.get()


def test_targets_are_opened_by_name(tmp_path: Path) -> None:
    assert isinstance(open_target(TargetOptions("numpy", None, None, None)), NumpyTarget)
    folder = open_target(TargetOptions("folder", tmp_path / "w", None, None))
    assert isinstance(folder, FolderTarget)
    folder.close()


@pytest.mark.parametrize(
    ("name", "folder", "url", "message"),
    [
        ("folder", False, False, "needs --folder"),
        ("numpy", True, False, "--folder does not go with"),
        ("folder", True, True, "--url does not go with"),
    ],
)
def test_options_that_do_not_go_together_are_named(
    name: TargetName, folder: bool, url: bool, message: str, tmp_path: Path
) -> None:
    options = TargetOptions(name, tmp_path if folder else None, None, "http://127.0.0.1:1" if url else None)
    with pytest.raises(ConfigError, match=message):
        open_target(options)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["follow", "--channel", "c", "--version", "1"], "contradict"),
        (["follow", "--slice", "*=0/2", "--folder", "x"], "--slice goes with --target numpy"),
        (["follow", "--target", "numpy", "--slice", "*"], "pattern=rank/ranks"),
        (["pin", "r0"], "say either a version or --release"),
        (["pin", "r0", "3", "--release"], "say either a version or --release"),
        (["promote", "--channel", "fleet/r0", "--version", "1"], "a replica's own"),
    ],
)
def test_contradicting_lines_end_with_2(
    line: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["fleet", *line, "--dir", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_a_probe_command_is_told_the_version_and_its_exit_code_counts(tmp_path: Path) -> None:
    program = tmp_path / "probe.py"
    program.write_text(
        "import os, pathlib, sys\n"
        f"pathlib.Path({str(tmp_path / 'told')!r}).write_text(os.environ['ROLLWIRE_VERSION'] + ' ' + os.environ['ROLLWIRE_FOLDER'])\n"
        "sys.exit('2 + 2 was 5' if os.environ['ROLLWIRE_VERSION'] == '8' else 0)\n"
    )
    probe = command_probe(f"{sys.executable} {program}", tmp_path, 60)
    probe(version(7, "a"))
    assert (tmp_path / "told").read_text() == f"7 {tmp_path / CURRENT}"
    with pytest.raises(ProbeFailed, match=r"ended with 1: 2 \+ 2 was 5"):
        probe(version(8, "a"))
    with pytest.raises(ProbeFailed, match="nowhere"):
        command_probe("/nowhere/at-all", None, 60)(version(7, "a"))
    with pytest.raises(ProbeFailed, match="timed out"):
        command_probe(f"{sys.executable} -c 'import time; time.sleep(60)'", None, 0.2)(version(7, "a"))
    for wrong in ("", "'"):
        with pytest.raises(ConfigError, match="--probe"):
            command_probe(wrong, None, 1)
