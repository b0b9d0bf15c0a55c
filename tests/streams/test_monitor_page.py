"""The monitor's fold: what each event changes, that repeats change nothing, and that the page survives JSON."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from rollwire.schemas.errors import ConfigError
from rollwire.schemas.golden import all_examples
from rollwire.schemas.records import (
    Coverage,
    Evaluation,
    Event,
    FleetStatus,
    GroupFate,
    LagCount,
    MismatchBy,
    Notice,
    Score,
    TrainStep,
    WeightVersion,
)
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.monitor.config import MonitorConfig, config_from_environment
from rollwire.streams.monitor.page import NOTICES, RECENT, Page, fold, from_json, to_json
from rollwire.streams.monitor.state import MonitorState
from rollwire.streams.seams.log import Record, TopicPartition

NOW_US = 1_767_225_600_000_000


def example(kind: type[Event]) -> Event:
    for made in all_examples():
        record = Record(made.topic, 0, 0, 0, made.key, made.value, tuple(made.headers))
        event = decode_record(record)
        if isinstance(event, kind):
            return event
    raise LookupError(kind)


def step(number: int, **changes: object) -> TrainStep:
    event = example(TrainStep)
    assert isinstance(event, TrainStep)
    return msgspec.structs.replace(
        event,
        step=number,
        base_version=number - 1,
        version=number,
        trained_tokens=8,
        lag_histogram=(LagCount(lag=0, tokens=8),),
        **changes,
    )


def version(number: int, stored_bytes: int) -> WeightVersion:
    event = example(WeightVersion)
    assert isinstance(event, WeightVersion)
    return msgspec.structs.replace(
        event,
        version=number,
        kind="delta",
        base_version=number - 1,
        full_bytes=1000,
        stored_bytes=stored_bytes,
    )


def status(at: int, state: str, pause_ms: float, served: int) -> FleetStatus:
    event = example(FleetStatus)
    assert isinstance(event, FleetStatus)
    changes = {"at_us": NOW_US + at, "state": state, "pause_ms": pause_ms, "version": served, "replica": "r0"}
    return msgspec.structs.replace(event, **changes)


def evaluation(number: int, value: float, tasks: int) -> Evaluation:
    event = example(Evaluation)
    assert isinstance(event, Evaluation)
    return msgspec.structs.replace(
        event, suite="heldout", version=number, tasks=tasks, scores=(Score(name="accuracy", value=value),)
    )


def folded(events: list[Event]) -> Page:
    page = Page()
    for event in events:
        page = fold(page, event, NOW_US)
    return page


def test_steps_come_in_any_order_and_twice() -> None:
    steps = [step(n, max_lag=n % 3, reward_mean=n / 10) for n in range(1, 9)]
    page = folded(list(steps))
    assert page.steps_done == 8
    assert [p.step for p in page.steps] == list(range(1, 9))
    assert (page.lag_max, page.lag_max_ever) == (2, 2)
    assert page.trained_tokens == 64
    for seed in range(5):
        shuffled = [*steps, *steps]
        random.Random(seed).shuffle(shuffled)
        assert folded(list(shuffled)) == page


def test_a_revert_is_a_step_that_measured_nothing() -> None:
    before = folded([step(1, max_lag=1, reward_mean=0.5)])
    page = folded([step(1, max_lag=1, reward_mean=0.5), step(2, groups=0, max_lag=0, reward_mean=0.0)])
    assert page.steps_done == 2
    assert page == msgspec.structs.replace(before, steps_done=2)


def test_versions_and_the_size_of_deltas() -> None:
    page = folded([version(1, 10), version(2, 30), version(3, 20), version(3, 20), version(2, 30)])
    assert page.latest_version == 3
    assert (page.delta_pct, page.delta_pct_p50) == (2.0, 2.0)
    assert page.deltas == (1.0, 3.0, 2.0)


def test_the_last_word_of_a_replica_counts_and_swaps_are_timed() -> None:
    page = folded([status(1, "swapped", 4.0, 1), status(3, "swapped", 6.0, 3), status(2, "staged", 0.0, 1)])
    assert page.served["r0"].version == 3
    assert page.pause_ms_p50 == 5.0
    assert folded([status(1, "swapped", 4.0, 1)] * 3).pauses == (4.0,)


def test_recent_values_are_bounded() -> None:
    page = folded([status(n, "swapped", float(n), n) for n in range(2 * RECENT)])
    assert len(page.pauses) == RECENT
    assert page.pauses[0] == RECENT


def test_the_surest_evaluation_of_a_version_stays() -> None:
    page = folded(
        [evaluation(0, 0.2, 512), evaluation(5, 0.3, 64), evaluation(5, 0.4, 512), evaluation(5, 0.9, 64)]
    )
    assert [(p.version, p.scores["accuracy"]) for p in page.evaluations] == [(0, 0.2), (5, 0.4)]
    latest = page.latest("heldout")
    assert latest is not None
    assert latest.version == 5
    assert page.latest("distinct") is None


def test_fates_are_counted_by_reason() -> None:
    fate = example(GroupFate)
    assert isinstance(fate, GroupFate)
    stale = msgspec.structs.replace(fate, fate="dropped", reason="stale", decided_by="pack")
    page = folded([stale, stale, msgspec.structs.replace(stale, reason="over_budget")])
    assert [(f.reason, f.groups) for f in page.fates] == [("stale", 2), ("over_budget", 1)]


def test_the_last_steps_mismatch_is_shown_by_fleet() -> None:
    row = MismatchBy(version=None, environment="countdown", fleet="a", tokens=8, p50=0.0, p99=0.5, max=1.0)
    rows = (row, msgspec.structs.replace(row, version=1))
    page = fold(Page(), step(2, mismatch_by=rows), NOW_US)
    assert page.mismatch == rows
    assert fold(page, step(1, mismatch_by=()), NOW_US).mismatch == rows
    assert fold(page, step(3, mismatch_by=()), NOW_US).mismatch == ()


def test_the_newest_notices_are_shown_once() -> None:
    made = [
        Notice(
            model="policy",
            name="mismatch_drift",
            severity="alarm",
            text=str(n),
            attributes={},
            at_us=NOW_US + n,
        )
        for n in range(NOTICES + 5)
    ]
    page = Page()
    for notice in [*made, made[-1], made[0]]:
        page = fold(page, notice, NOW_US)
    assert [told.text for told in page.notices] == [str(n) for n in range(NOTICES + 4, 4, -1)]
    assert page.notices[0].severity == "alarm"


def test_a_page_with_every_example_survives_json() -> None:
    events = [
        decode_record(Record(e.topic, 0, 0, 0, e.key, e.value, tuple(e.headers)))
        for e in all_examples()
        if e.value is not None
    ]
    page = folded([*events, step(50, loss=math.nan, grad_norm=math.inf)])
    assert page.steps[-1].loss is None
    assert page.steps[-1].grad_norm is None
    assert from_json(to_json(page)) == page


def test_each_record_is_folded_once_and_poison_is_skipped() -> None:
    state = MonitorState()
    fate = outgoing(example(GroupFate), source="test", time_us=NOW_US)
    for offset in (4, 4, 7, 4):
        state.take(Record("group-fates", 1, offset, 0, fate.key, fate.value, fate.headers), NOW_US)
    state.take(Record("group-fates", 1, 9, 0, b"key", b"poison", ()), NOW_US)
    assert sum(f.groups for f in state.page.fates) == 2
    assert state.skipped == 1


def test_rates_from_end_offsets() -> None:
    state = MonitorState()
    ends = {TopicPartition("rollouts", 0): 10, TopicPartition("rollouts", 1): 5}
    state.sample(ends, NOW_US)
    assert not state.page.rates
    state.sample({p: end + 20 for p, end in ends.items()}, NOW_US + 2_000_000)
    (rate,) = state.page.rates
    assert (rate.topic, rate.end, rate.per_s) == ("rollouts", 55, 20.0)


def test_settings_from_the_environment() -> None:
    config = config_from_environment({"ROLLWIRE_PREFIX": "p.", "ROLLWIRE_MONITOR_PORT": "81"})
    assert config == MonitorConfig(prefix="p.", web_port=81)
    assert config.page_key == "p.monitor/page"
    with pytest.raises(ConfigError, match="ROLLWIRE_MONITOR_PORT='no'"):
        config_from_environment({"ROLLWIRE_MONITOR_PORT": "no"})


def test_the_coverage_of_the_last_step_is_shown() -> None:
    rows = (Coverage(outcome="answered", rollouts=4, signalled=3, scored=3),)
    page = fold(Page(), step(1, coverage=rows), NOW_US)
    assert page.coverage == rows
    assert from_json(to_json(page)) == page
    assert fold(page, step(2), NOW_US).coverage == ()
    assert fold(fold(Page(), step(2), NOW_US), step(1, coverage=rows), NOW_US).coverage == ()
