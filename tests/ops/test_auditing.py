"""How an audit's report is printed, whatever stands in it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rollwire.ops.auditing import auditing, conclude
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
