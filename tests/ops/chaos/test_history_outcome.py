"""What counts as a good history run, and what its figures say."""

from __future__ import annotations

import pytest

from rollwire.ops.chaos.history import Judged, Outcome, figures, red_rounds
from rollwire.ops.chaos.history_check import NAMES, Finding, Op, Sent
from rollwire.ops.chaos.history_report import print_outcome

CLEAN = Judged(100, 60, ())
LOST = Finding("lost-write", (3,), "value 20 in a[0] was acknowledged to w, and readers went past it")
RED = Judged(8, 4, (LOST, LOST))
GOOD = Outcome(CLEAN, ("storm", "cut-answer"), RED, 2, 2, None)


@pytest.mark.parametrize(
    ("outcome", "ok"),
    [
        (GOOD, True),
        (Outcome(Judged(100, 60, (LOST,)), GOOD.faults, RED, 2, 2, None), False),
        (
            Outcome(Judged(100, 60, (), ("a[0] was not read to its end",)), GOOD.faults, RED, 2, 2, None),
            False,
        ),
        (Outcome(CLEAN, (), RED, 2, 2, None), False),
        (Outcome(CLEAN, GOOD.faults, RED, 3, 2, None), False),
        (Outcome(CLEAN, GOOD.faults, Judged(0, 0, (), ("round 1 was not played",)), 0, 0, None), False),
    ],
)
def test_what_is_ok(outcome: Outcome, ok: bool) -> None:
    assert outcome.ok is ok


def test_figures() -> None:
    unfinished = Judged(100, 60, (LOST,), ("a[0] was not read to its end",))
    values = {f.name: f.value for f in figures(Outcome(unfinished, GOOD.faults, RED, 2, 2, None))}
    assert values["history.errors"] == 2
    assert values["history.lost_write"] == 1
    assert sum(values[f"history.{name.replace('-', '_')}"] for name in NAMES) == 1
    assert values["history.control_errors"] == 2
    assert values["history.faults"] == 2
    only_broken = Outcome(CLEAN, GOOD.faults, Judged(0, 0, (), ("round 1 was not played",)), 0, 0, None)
    assert {f.name: f.value for f in figures(only_broken)}["history.control_errors"] == 0


def test_rounds_that_the_findings_name() -> None:
    ops = [
        Op(id=n, process="w", kind="txn", start=n, outcome="info", sends=(Sent(value, "a", 0),))
        for n, value in ((1, 10), (2, 12), (3, 20), (4, 30))
    ]
    assert red_rounds(ops, [LOST, Finding("torn", (4, 99), "")]) == {2, 3}


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    print_outcome(GOOD)
    green = capsys.readouterr().out
    assert "100 operations, 60 of them transactions; 2 faults (1 cut-answer, 1 storm); 0 errors" in green
    assert "2 of 2 rounds are red, 2 errors" in green
    assert "NOT" not in green
    print_outcome(Outcome(Judged(100, 60, (LOST,)), GOOD.faults, RED, 2, 2, None))
    red = capsys.readouterr().out
    assert LOST.text in red
    assert "NOT AS IT SHOULD BE" in red
