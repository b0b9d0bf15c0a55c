"""Settings that changed in mid-history: each outcome is decided again with those that its processor had said by then."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import ConfigError
from rollwire.schemas.records import Event, Notice
from rollwire.streams import synthetic
from rollwire.streams.assemble_config import AssembleConfig
from rollwire.streams.emit import outgoing
from rollwire.streams.findings import Kind
from rollwire.streams.pack import PackConfig
from rollwire.streams.replay.audit import audit_replay
from rollwire.streams.replay.settings import Spoken, read_spoken, spoken_in
from rollwire.streams.run_assemble import drive
from rollwire.streams.run_pack import drive as drive_pack
from rollwire.streams.runtime import Drive, RuntimeConfig, Session
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.settings_notice import settings_notice, tell, told_of

FIRST = AssembleConfig(require_traces=False, group_deadline_s=30.0)
SECOND = AssembleConfig(require_traces=False, group_deadline_s=30.0, baseline="leave_one_out")
PACKS = (
    PackConfig(groups_per_step=2, token_budget=64, max_steps_ahead=3),
    PackConfig(groups_per_step=3, token_budget=64, max_steps_ahead=3),
)
RUNTIME = RuntimeConfig(linger_ms=0, idle_s=0, end_check_s=0, offsets_only_s=0.2)


class Bench:
    """Both processors on one log, each with the settings of now."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.log = MemoryLog(dict.fromkeys(TOPICS, 1), self.clock)
        self._sessions: list[Session] = []

    def start(self, assemble: AssembleConfig, pack: PackConfig) -> None:
        """As the processes do: what they decide with is said first."""
        for session in self._sessions:
            session.close()
        line = {"model": "policy", "lineage": synthetic.LINEAGE, "code": "1"}
        tell(self.log, "assemble", {"assemble": assemble}, **line, clock=self.clock)
        tell(self.log, "pack", {"pack": pack}, **line, clock=self.clock)
        drives: list[Drive] = [
            drive(assemble, "x.", 0),
            drive_pack(self.log, pack, "x.", "policy", synthetic.LINEAGE),
        ]
        self._sessions = [Session(self.log, one, RUNTIME, self.clock) for one in drives]

    def write(self, *events: Event) -> None:
        writer = self.log.writer()
        now_us = self.clock.now_us()
        writer.write([outgoing(event, source="rollwire/test", time_us=now_us) for event in events])
        self.clock.advance(0.01)

    def turn(self) -> None:
        for _ in range(4):
            for session in self._sessions:
                session.turn()
                self.clock.advance(0.05)


def group(number: int, at_us: int) -> tuple[list[Event], list[Event]]:
    """Rollouts, and their rewards."""
    name = synthetic.group_id(at_us, number)
    rollouts: list[Event] = [synthetic.rollout(name, i, 3, at_us=at_us, top_k=0) for i in range(3)]
    return rollouts, [synthetic.reward(name, i, float(i), at_us=at_us) for i in range(3)]


@pytest.fixture(scope="module")
def changed() -> MemoryLog:
    """Both processors start again with other settings, while groups are open."""
    bench = Bench()
    bench.start(FIRST, PACKS[0])
    bench.write(synthetic.version(0, at_us=bench.clock.now_us()))
    late: list[Event] = []
    for number in range(1, 13):
        rollouts, rewards = group(number, bench.clock.now_us())
        bench.write(*rollouts)
        if number % 3 == 0:
            late += rewards[1:]
            rewards = rewards[:1]
        bench.write(*rewards)
        bench.turn()
        if number == 6:
            bench.start(SECOND, PACKS[1])
    bench.write(*late)
    bench.turn()
    return bench.log


def test_each_outcome_follows_from_the_settings_of_its_time(changed: MemoryLog) -> None:
    spoken = read_spoken(changed)
    assert [len(spoken.since(name)) for name in ("assemble", "pack")] == [2, 2]
    report = audit_replay(changed, [], spoken)
    assert report.findings == ()
    assert report.checked["groups"] == 12
    assert report.checked["packed-batches"] >= 3


@pytest.mark.parametrize("processor", ["assemble", "pack"])
def test_one_setting_for_all_of_it_is_seen(changed: MemoryLog, processor: str) -> None:
    config: dict[str, AssembleConfig | PackConfig] = {"assemble": FIRST, "pack": PACKS[0]}
    told = [
        (told_of(name, {name: one}, lineage=synthetic.LINEAGE, code="", at_us=0), "policy")
        for name, one in config.items()
    ]
    report = audit_replay(changed, [processor], Spoken(told))
    assert {finding.kind for finding in report.findings} == {Kind.OUTCOME_DIFFERS}


def notices_of_a_run(**settings: str) -> Iterator[Notice]:
    told = told_of("pack", {"pack": PACKS[0]}, lineage="line", code="", at_us=7)
    yield msgspec.structs.replace(settings_notice(told, model="policy"), attributes=settings)


def test_a_whole_runs_settings_tell_of_its_processors() -> None:
    said = {
        "lineage": '"line"',
        "assemble.baseline": '"leave_one_out"',
        "pack.groups_per_step": "5",
        "policy.hidden_size": "32",
    }
    spoken = Spoken(spoken_in(notices_of_a_run(**said)))
    since = spoken.at("pack", 10)
    assert (since.lineage, since.from_us) == ("line", 7)
    assert spoken.pack(since).groups_per_step == 5
    assert spoken.pack(since).cost_per_token is not None  # the policy's, whatever the default is then
    assert spoken.join("assemble", spoken.at("assemble", 10)) == AssembleConfig(baseline="leave_one_out")
    assert not list(spoken_in(notices_of_a_run(**{"pack.groups_per_step": "none"})))


def test_changes_lie_over_what_was_said_and_wrong_ones_are_named(changed: MemoryLog) -> None:
    spoken = read_spoken(changed, {"pack.max_lag_versions": 2, "pack.cohort.max_waiting": 600})
    config = spoken.pack(spoken.at("pack", 0))
    assert (config.max_lag_versions, config.cohort.max_waiting, config.groups_per_step) == (2, 600, 2)
    wrong = read_spoken(changed, {"pack.max_lag": 2, "assemble.base.line": "mean"})
    with pytest.raises(ConfigError, match=r"pack\.max_lag"):
        wrong.pack(wrong.at("pack", 0))
    with pytest.raises(ConfigError, match=r"assemble\.base"):
        wrong.join("assemble", wrong.at("assemble", 0))
