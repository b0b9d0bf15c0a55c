"""What a bounce comes to: it is good only where everything could be judged and nothing was found."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollwire.consumers.audit.hours import FlowHour, HourLedger, HourLine
from rollwire.consumers.ledger import Ledger, Line
from rollwire.ops.chaos.bounce import BounceOptions, Outcome, targets
from rollwire.ops.chaos.faults import plan_faults
from rollwire.ops.chaos.report import figures, print_outcome
from rollwire.ops.chaos.strike import Hit
from rollwire.ops.chaos.verdict import Finding, Verdict, expected_totals
from rollwire.ops.chaos.workload import Workload, known

LOAD = Workload(
    seed=5, groups=40, rate=10.0, begin_us=1_767_225_600_000_000, deadline_s=20.0, horizon_s=40.0, groups_per_step=10
)  # fmt: skip
KNOWN = known(LOAD)
GOOD = Verdict((), expected_totals(KNOWN), expected_totals(KNOWN))


def outcome() -> Outcome:
    options = BounceOptions(faults=3)
    made = Outcome(options, KNOWN, Path("folder"))
    made.hits = [Hit(fault, 1.0, 2.0, "started again") for fault in plan_faults(("a", "b"), 3, 0)]
    made.during = made.after = GOOD
    made.ledger = Ledger(lines=())
    made.through = True
    return made


def values(made: Outcome) -> dict[str, float]:
    return {figure.name: figure.value for figure in figures(made)}


def test_a_good_run_is_good_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    made = outcome()
    assert made.ok
    found = values(made)
    assert [found[f"bounce.{what}"] for what in ("lost", "repeated", "torn", "wrong", "late_stops")] == [
        0
    ] * 5
    assert found["bounce.faults"] == 3
    print_outcome(made)
    assert "nothing lost, repeated or torn" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["lost", "repeated", "torn", "wrong"])
def test_one_finding_of_one_reader_is_a_failure(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = outcome()
    made.after = GOOD._replace(findings=(Finding(what, "the thing itself"),))  # type: ignore[arg-type]
    assert not made.ok
    assert values(made)[f"bounce.{what}"] == values(made)[f"bounce.{what}.after"] == 1
    assert values(made)[f"bounce.{what}.during"] == 0
    print_outcome(made)
    said = capsys.readouterr().out
    assert "the thing itself" in said
    assert "FAILED" in said


def test_what_could_not_be_judged_is_no_zero(capsys: pytest.CaptureFixture[str]) -> None:
    made = outcome()
    made.during = None
    made.unreadable.append("reading to the end: it stands still")
    assert not made.ok
    assert "bounce.lost" not in values(made)
    assert values(made)["bounce.unreadable"] == 1
    print_outcome(made)
    assert "it stands still" in capsys.readouterr().out


def test_fewer_faults_a_gap_a_late_stop_and_a_load_that_is_not_through_are_failures() -> None:
    few, gap, late, stuck = (outcome() for _ in range(4))
    few.hits.pop()
    line = Line(
        topic="groups", received=2, accepted=1, refused=0, shed=0, pending=0, extra=0, missing_ids=("g",), extra_ids=()
    )  # fmt: skip
    gap.ledger = Ledger(lines=(line,))
    late.hits[0] = late.hits[0]._replace(late=True)
    stuck.through = False
    unclosed = outcome()
    flow = FlowHour(flow="groups", hour="2026-11-30T06", started=2, closed=1, open=1, lost=1, unstarted=0)
    hour = HourLine(
        topic="groups", hour="2026-11-30T06", received=2, accepted=1, refused=0, shed=0, pending=0, extra=0
    )  # fmt: skip
    unclosed.hours = HourLedger(lines=(hour,), flows=(flow,), differences=())
    assert not any(made.ok for made in (few, gap, late, stuck, unclosed))
    found = values(unclosed)
    assert (found["ledger.gap"], found["ledger.gap.2026-11-30T06"], found["ledger.unclosed"]) == (1, 1, 1)
    assert values(gap)["bounce.ledger_gap"] == values(late)["bounce.late_stops"] == 1


def test_a_broker_that_is_not_ours_is_left_alone() -> None:
    everyone = targets(())
    assert "broker" in everyone
    assert set(everyone) - set(targets(("kafka", "s3"))) == {"broker"}
    assert targets(("s3", "redis")) == everyone
