"""What the feedback demo's page shows, from a log in memory."""

from __future__ import annotations

from pathlib import Path

from rollwire.ops.demo.feedback.tally import TOPICS, Answered
from rollwire.ops.demo.feedback.watch import FeedbackWatch
from rollwire.ops.demo.options import DemoOptions, new_settings
from rollwire.schemas.records import FleetStatus, Reward
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.keys_memory import MemoryKeys
from rollwire.streams.seams.log import Outgoing
from rollwire.streams.seams.log_memory import MemoryLog

NOW_US = 1_767_225_600_000_000
GROUP = "019b76da-a800-7000-8000-000000000001"
SETTINGS = new_settings(DemoOptions(dir=Path(), feedback=True, steps=2), "x")


def swapped(version: int) -> FleetStatus:
    return FleetStatus(
        fleet="serving",
        replica=SETTINGS.serving.replica,
        state="swapped",
        version=version,
        wanted_version=version,
        state_digest="ab" * 16,
        stage_ms=1.0,
        pause_ms=1.0,
        reason="",
        open_rollouts=0,
        at_us=NOW_US,
    )


def reward() -> Reward:
    return Reward(
        rollout_id=f"{GROUP}.0",
        group_id=GROUP,
        reward=1.0,
        components=(),
        outcome="answered",
        source="user",
        verifier="demo",
        verifier_version="1",
        evidence=("click",),
        scored_us=NOW_US,
    )


def test_the_watch_believes_the_topics_and_passes_over_what_does_not_decode() -> None:
    log = MemoryLog(dict.fromkeys(TOPICS, 2))
    watch, writer = FeedbackWatch(log, SETTINGS, MemoryKeys()), log.writer()
    watch.poll()
    before = watch.progress()
    assert watch.served == -1
    events = (swapped(0), reward(), swapped(1))
    writer.write(
        [Outgoing("rewards", b"k", b"poison"), *(outgoing(e, source="t", time_us=NOW_US) for e in events)]
    )
    watch.poll()
    assert watch.served == 1
    assert watch.progress() != before
    assert not watch.trained()
    assert watch.rewarded()
    watch.tally.answers["other.0"] = Answered(NOW_US, 1, True, "answered")
    watch.tally.answers["third.0"] = Answered(NOW_US, 0, False, "answered")
    assert not watch.rewarded()
    assert (watch.answers_of(1), watch.answers_of(0)) == (1, 2)
    shown = watch.shown()
    assert shown.words.startswith("likes 50.0 %")
    assert any("2 versions served" in row.value for row in shown.rows)
    assert "1 rewards" in watch.describe()
    watch.close()
