"""pack after a revert: plans begin anew, what was sampled from abandoned versions is refused, restarts know of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rollwire.schemas.records import DeadLetter, Event, Group, GroupFate, PackedBatch, WeightVersion
from rollwire.streams import synthetic
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.pack import PackConfig
from rollwire.streams.pack_step import PackStep
from rollwire.streams.run_pack import drive
from rollwire.streams.runtime import RuntimeConfig, Session
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan

LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"
NOW_US = 1_767_225_600_000_000
TOPICS = {"groups": 1, "group-fates": 1, "packed-batches": 1, "weight-versions": 1, "dead-letters": 1}
RUNTIME = RuntimeConfig(linger_ms=0, idle_s=0, end_check_s=0, offsets_only_s=0)


class MakeGroup(Protocol):
    def __call__(self, number: int, versions: Sequence[int] = (0,)) -> Group: ...


def version_event(version: int, reverts_to: int | None = None) -> WeightVersion:
    return synthetic.version(version, lineage=LINEAGE, at_us=NOW_US, reverts_to=reverts_to)


class Bench:
    """pack in this thread over a log in memory."""

    def __init__(self, config: PackConfig) -> None:
        self.clock = ManualClock()
        self.log = MemoryLog(TOPICS, self.clock)
        self.config = config
        self.session = self.start()

    def start(self) -> Session:
        return Session(self.log, drive(self.log, self.config, "t.", "policy", LINEAGE), RUNTIME, self.clock)

    def restart(self) -> None:
        self.session.close()
        self.session = self.start()

    def send(self, *events: Event) -> None:
        writer = self.log.writer()
        writer.write([outgoing(event, source="test", time_us=NOW_US) for event in events])
        writer.close()
        self.settle()

    def settle(self) -> None:
        for _ in range(12):
            self.session.turn()
            self.clock.advance(0.05)

    @property
    def packer_next(self) -> int:
        step = self.session.step
        assert isinstance(step, PackStep)
        return step.packer.next_step

    def read(self, topic: str) -> list[Event]:
        return [decode_record(record) for record in scan(self.log, [topic])]

    def plans(self) -> list[tuple[int, int | None]]:
        return [(e.step, e.newest_revert) for e in self.read("packed-batches") if isinstance(e, PackedBatch)]

    def fates(self) -> list[str]:
        return [e.reason for e in self.read("group-fates") if isinstance(e, GroupFate)]

    def letters(self) -> list[str]:
        return [e.reason for e in self.read("dead-letters") if isinstance(e, DeadLetter)]


def trained(config: PackConfig, make_group: MakeGroup, steps: int) -> Bench:
    """Versions 0 to `steps`, each but the first by a plan."""
    bench = Bench(config)
    bench.send(version_event(0))
    for step in range(1, steps + 1):
        bench.send(make_group(step, (step - 1,)))
        bench.send(version_event(step))
    return bench


def test_plans_begin_anew_behind_those_that_nobody_took(make_group: MakeGroup) -> None:
    bench = trained(PackConfig(groups_per_step=1, max_steps_ahead=2), make_group, 4)
    bench.send(make_group(10, (4,)), make_group(11, (4,)))  # plans for 5 and 6, which are not taken
    assert [step for step, _ in bench.plans()] == [1, 2, 3, 4, 5, 6]
    bench.send(version_event(5, reverts_to=2))
    bench.send(make_group(12, (5,)))
    assert bench.plans()[-1] == (6, 5)
    bench.restart()
    assert bench.packer_next == 7
    bench.send(version_event(6), make_group(13, (6,)))
    assert bench.plans()[-1] == (7, 5)


def test_a_restart_right_after_a_revert_plans_the_step_behind_it(make_group: MakeGroup) -> None:
    bench = trained(PackConfig(groups_per_step=1, max_steps_ahead=3), make_group, 3)
    bench.send(*(make_group(n, (3,)) for n in (10, 11, 12)))
    assert bench.packer_next == 7
    bench.session.close()
    bench.session = bench.start()
    bench.send(version_event(4, reverts_to=1))
    assert bench.packer_next == 5
    bench.restart()
    assert bench.packer_next == 5


def test_what_was_sampled_from_abandoned_versions_is_refused_for_that_reason(make_group: MakeGroup) -> None:
    bench = trained(PackConfig(groups_per_step=3, max_lag_versions=9, max_steps_ahead=0), make_group, 0)
    for step in (1, 2):
        bench.send(*(make_group(3 * step + n, (step - 1,)) for n in range(3)))
        bench.send(version_event(step))
    waiting, mixed = make_group(20, (2,)), make_group(21, (1, 2))
    bench.send(waiting, make_group(22, (1,)))
    bench.send(version_event(3, reverts_to=1))
    assert bench.fates().count("lineage_abandoned") == 1  # it waited when its version was given up
    assert bench.letters() == []
    bench.send(mixed, make_group(23, (2,)))
    assert bench.fates().count("lineage_abandoned") == 3
    assert bench.letters() == ["lineage_abandoned"] * 2
    bench.send(make_group(24, (3,)), make_group(25, (0,)))
    assert bench.plans()[-1] == (4, 3)
    dropped = [
        e for e in bench.read("group-fates") if isinstance(e, GroupFate) and e.reason == "lineage_abandoned"
    ]
    assert {fate.for_version for fate in dropped} == {3}
    assert "version 3 reverts to 1" in dropped[0].detail
    assert all(fate.replica for fate in dropped)  # its slot goes back
