"""How an audit's report is printed, whatever stands in it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rollwire.ops.auditing import auditing, conclude
from rollwire.ops.cli import run
from rollwire.streams.findings import Finding, Kind, Report

ODD = ("[/red]", "a[/b]c", "[bold]x", "[link=x]y", "rollouts[0] at 7", "\\[z]")


def test_what_stands_in_events_is_printed_as_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Ids are strings of whoever wrote the event."""
    findings = tuple(Finding(kind=Kind.EVENT_UNKNOWN, where=odd, detail=f"it is {odd}") for odd in ODD)
    file = tmp_path / "report.json"
    with auditing():
        code = conclude(Report(command="x", findings=findings, checked={"events": 1}, notes=ODD), file)
    assert code == 1
    printed = capsys.readouterr().out
    for odd in ODD:
        assert f"note: {odd}" in printed
        assert f"it is {odd}" in printed
    assert len(msgspec.json.decode(file.read_bytes())["findings"]) == len(ODD)


def test_an_answer_that_cannot_be_written_is_said_and_is_no_finding(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended, auditing():
        conclude(Report(command="x", findings=(), checked={}), tmp_path / "nowhere" / "report.json")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "report.json: No such file" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "command",
    [
        "audit seal --every 0",
        "audit seal --every -1",
        "audit seal --lock-days -1",
        "archive --every 0",
        "archive --wait -1",
    ],
)
def test_times_that_are_none_are_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pause of nothing would ask broker and store without one."""
    with pytest.raises(SystemExit) as ended:
        run([*command.split(), "--dir", str(tmp_path)])
    assert ended.value.code == 2
    assert "Must be" in capsys.readouterr().err
