from __future__ import annotations

import dataclasses
import io

from rich.console import Console

from rollwire.ops.demo.page import Frame, Row, Shown, draw, line, sparkline
from rollwire.streams.monitor.page import FateCount, Page, Point, Rate, StepPoint

FRAME = Frame(
    title="rollwire demo",
    phase="training",
    environment="countdown",
    steps=250,
    steps_done=40,
    max_lag=3,
    elapsed_s=75.0,
    left_s=130.0,
    url="http://127.0.0.1:6066/page",
    said=("pack ended with signal SIGKILL and was started again",),
)


def point(suite: str, version: int, accuracy: float) -> Point:
    return Point(
        suite=suite,
        version=version,
        scores={"accuracy": accuracy},
        tasks=512,
        samples_per_task=4,
        replica="e",
        at_us=1,
    )


def step(number: int, reward: float) -> StepPoint:
    return StepPoint(
        step=number,
        reward_mean=reward,
        loss=0.1,
        entropy=0.5,
        grad_norm=1.0,
        max_lag=2,
        mismatch_p50=0.001,
        mismatch_p99=0.25,
        same_version_p50=1e-7,
        same_version_p99=3e-6,
        no_replay_p99=0.31,
        tokens_per_s=5_000.0,
        duration_ms=300.0,
    )


PAGE = Page(
    steps_done=40,
    latest_version=40,
    evaluations=(
        point("countdown.heldout", 0, 0.2),
        point("countdown.heldout.quick", 25, 0.3),
        point("countdown.heldout", 25, 0.35),
    ),
    steps=tuple(step(i, i / 100) for i in range(1, 41)),
    lag_max=2,
    fates=(FateCount(decided_by="pack", fate="kept", reason="trained", groups=960),),
    delta_pct=14.25,
    full_bytes=672_832,
    pause_ms_p50=1.5,
    rates=(Rate(topic="rollouts", end=9_000, per_s=750.0), Rate(topic="rewards", end=9_000, per_s=740.0)),
)


def render(page: Page, width: int = 110) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(draw(page, FRAME))
    return out.getvalue()


def test_everything_that_was_promised_is_on_the_page() -> None:
    text = render(PAGE)
    for expected in (
        "step 40 of 250",
        "2:10 left",
        "35.0 % at version 25, 20.0 % at the start",  # the full evaluation, not the quick one
        "0.400",
        "0.25 nats, 3e-06 at lag 0, 0.31 unreplayed",
        "2 of at most 3 versions",
        "960 kept (trained)",
        "14.2 % of 0.67 MB",
        "1.5 ms",
        "http://127.0.0.1:6066/page",
        "1,490   rollouts 750, rewards 740",
        "pack ended with signal SIGKILL",
    ):
        assert expected in text, f"{expected!r} is missing from\n{text}"


def test_an_empty_page_draws_and_invents_nothing() -> None:
    text = render(Page())
    assert "none yet" in text
    assert "0.0 %" not in text


def test_the_line_says_the_same() -> None:
    text = line(PAGE, FRAME)
    for expected in (
        "step 40/250",
        "held-out 35.0 %",
        "lag 2",
        "mismatch p99 0.25",
        "delta 14.2 %",
        "1,490 events/s",
        "2:10 left",
    ):
        assert expected in text


def test_sparklines_scale_from_lowest_to_highest() -> None:
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([]) == ""
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert len(sparkline([float(i) for i in range(1_000)], width=32)) == 32


def test_a_run_that_is_for_something_else_shows_that_in_place_of_accuracy() -> None:
    shown = Shown("likes 61.0 %", (Row("answers people like", "61.0 % of the last 400", "▁█"),))
    frame = dataclasses.replace(FRAME, shown=shown)
    assert "likes 61.0 %" in line(PAGE, frame)
    out = io.StringIO()
    Console(file=out, width=110).print(draw(PAGE, frame))
    assert "61.0 % of the last 400" in out.getvalue()
    for text in (line(PAGE, frame), out.getvalue()):
        assert "held-out" not in text
