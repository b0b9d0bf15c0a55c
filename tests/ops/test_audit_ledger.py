from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from rollwire.consumers.audit.hours import FlowHour, HourLedger, HourLine
from rollwire.ops.cli import run
from rollwire.ops.commands.audit_ledger import draw


def line(topic: str, hour: str, received: int, accepted: int) -> HourLine:
    return HourLine(
        topic=topic, hour=hour, received=received, accepted=accepted, refused=0, shed=0, pending=0, extra=0
    )


def drawn(ledger: HourLedger) -> list[list[str]]:
    out = io.StringIO()
    draw(Console(file=out, width=200, color_system=None), ledger)
    return [row.split() for row in out.getvalue().splitlines()]


def test_topics_are_summed_and_few_hours_are_shown() -> None:
    lines = (
        line("rewards", "2026-11-30T06", 1_000, 1_000),
        line("rewards", "2026-11-30T07", 500, 499),
        line("rollouts", "2026-11-30T06", 7, 7),
    )
    flows = tuple(
        FlowHour(flow="groups", hour=hour, started=9, closed=8, open=still, lost=0, unstarted=0)
        for hour, still in (("2026-11-30T06", 1), ("2026-11-30T07", 2))
    )
    rows = drawn(HourLedger(lines=lines, flows=flows, differences=()))
    assert ["rewards", "1,500", "1,499", "0", "0", "0", "1"] in rows
    assert ["rollouts", "7", "7", "0", "0", "0", "0"] in rows
    assert ["rewards", "2026-11-30T07", "500", "499", "0", "0", "0", "1"] in rows
    assert ["rewards", "2026-11-30T06", "1,000", "1,000", "0", "0", "0", "0"] in rows
    assert ["groups", "18", "16", "2", "0"] in [row[:5] for row in rows]


def test_of_many_hours_only_those_that_do_not_add_up_are_shown() -> None:
    hours = [f"2026-11-{day:02}T{hour:02}" for day in range(1, 11) for hour in range(24)]
    lines = [line("rewards", hour, 5, 5) for hour in hours]
    lines[17] = line("rewards", hours[17], 5, 4)
    rows = drawn(HourLedger(lines=tuple(lines), flows=(), differences=()))
    assert ["rewards", hours[17], "5", "4", "0", "0", "0", "1"] in rows
    assert not any(hours[16] in row for row in rows)
    assert any(row[:1] == ["240"] for row in rows)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--from", "yesterday"), "yesterday"),
        (("--topic", "rollout"), "did you mean 'rollouts'"),
        (("--metrics", "ftp://here"), "not an http address"),
        (("--metrics", "http://127.0.0.1:1/metrics"), "127.0.0.1:1"),
        ((), "no stack"),
    ],
)
def test_an_account_that_cannot_be_made_ends_with_2(
    options: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["audit", "ledger", "--dir", str(tmp_path), *options])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
