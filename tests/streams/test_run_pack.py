"""pack over a log: restarts, unknown outcomes and the tail search, on the in-memory twin."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import msgspec
import pytest

from rollwire.schemas.errors import ConfigError, Fenced, TransactionUnknown
from rollwire.schemas.records import (
    Cut,
    Event,
    Group,
    GroupFate,
    Member,
    PackedBatch,
    Rollout,
    WeightVersion,
)
from rollwire.streams import synthetic
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.pack import PackConfig
from rollwire.streams.pack_cohort import CohortConfig
from rollwire.streams.pack_step import PackStep
from rollwire.streams.run_pack import drive, run_pack
from rollwire.streams.runtime import RuntimeConfig, Session
from rollwire.streams.seams.clock import ManualClock, SystemClock
from rollwire.streams.seams.forwarding import ForwardingTransactions
from rollwire.streams.seams.log import TopicPartition, TransactionalWriter
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan

LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"
NOW_US = 1_767_225_600_000_000
TOPICS = {
    "groups": 4,
    "group-fates": 4,
    "packed-batches": 8,
    "weight-versions": 1,
    "dead-letters": 1,
    "notices": 1,
}


class MakeGroup(Protocol):
    def __call__(
        self,
        number: int,
        versions: Sequence[int] = (0,),
        *,
        lengths: Sequence[int] | None = None,
        lineage: str = LINEAGE,
    ) -> Group: ...


class FlakyLog(MemoryLog):
    """Answers every nth commit with doubt; in half of these cases the transaction went through."""

    def __init__(self, every: int) -> None:
        super().__init__(TOPICS)
        self._every = every
        self.commits = 0

    def transactional_writer(self, transactional_id: str, timeout_s: float = 60.0) -> TransactionalWriter:
        return _FlakyWriter(self, super().transactional_writer(transactional_id, timeout_s), self._every)


class _FlakyWriter(ForwardingTransactions):
    def __init__(self, log: FlakyLog, inner: TransactionalWriter, every: int) -> None:
        super().__init__(inner)
        self._log, self._every = log, every

    def commit(
        self,
        group: str,
        offsets: Mapping[TopicPartition, int],
        timeout_s: float = 30.0,
        *,
        also: Mapping[str, Mapping[TopicPartition, int]] | None = None,
    ) -> None:
        self._log.commits += 1
        doubt, done = self._log.commits % self._every == 0, self._log.commits % (2 * self._every) == 0
        if not doubt or done:
            self._inner.commit(group, offsets, timeout_s, also=also)
        if doubt:
            raise TransactionUnknown("no answer")


def version_event(version: int) -> WeightVersion:
    return synthetic.version(version, lineage=LINEAGE, at_us=NOW_US)


def send(log: MemoryLog, *events: Event) -> None:
    writer = log.writer()
    writer.write([outgoing(event, source="test", time_us=NOW_US) for event in events])
    writer.close()


def read(log: MemoryLog, topic: str) -> list[Event]:
    return [decode_record(record) for record in scan(log, [topic])]


class Running:
    """`run_pack` in a thread."""

    def __init__(self, log: MemoryLog, config: PackConfig) -> None:
        self.stop = threading.Event()
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(log, config))
        self._thread.start()

    def _run(self, log: MemoryLog, config: PackConfig) -> None:
        try:
            run_pack(log, config, prefix="t.", model="policy", lineage=LINEAGE, stop=self.stop)
        except (Fenced, ConfigError) as error:
            self.error = error

    def until(self, holds: Callable[[], bool], deadline_s: float = 20.0) -> None:
        end = time.monotonic() + deadline_s
        while not holds():
            assert time.monotonic() < end, "not within the deadline"
            assert self._thread.is_alive(), f"pack ended: {self.error}"
            self.stop.wait(0.01)

    def end(self) -> None:
        self.stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive()


def check(log: MemoryLog, groups: Sequence[Group], config: PackConfig) -> None:
    fates = [e for e in read(log, "group-fates") if isinstance(e, GroupFate)]
    assert len({f.group_id for f in fates}) == len(fates)
    assert {f.group_id for f in fates} <= {g.group_id for g in groups}
    plans = [e for e in read(log, "packed-batches") if isinstance(e, PackedBatch) and e.rank == 0]
    assert [p.step for p in plans] == list(range(1, len(plans) + 1))
    kept = sorted(f.group_id for f in fates if f.fate == "kept")
    assert sorted(i for p in plans for i in p.group_ids) == kept
    assert all(p.base_version - p.oldest_version <= config.max_lag_versions for p in plans)


@pytest.mark.parametrize("every", [2, 3, 1000])
def test_nothing_twice_and_no_hole_when_outcomes_are_unknown(make_group: MakeGroup, every: int) -> None:
    log, config = FlakyLog(every), PackConfig(groups_per_step=3, max_lag_versions=1, max_steps_ahead=0)
    send(log, version_event(0))
    running = Running(log, config)
    groups: list[Group] = []

    def settled(steps: int) -> bool:
        if len(read(log, "packed-batches")) < steps:
            return False
        return len(groups) - len(read(log, "group-fates")) < config.groups_per_step

    try:
        for latest in range(10):
            # The second of four is as old as can be: stale from step 3 on.
            versions = [latest, 0, latest, latest]
            groups += [make_group(len(groups) + i, (version,)) for i, version in enumerate(versions)]
            send(log, *groups[-4:])
            running.until(partial(settled, latest + 1))
            send(log, version_event(latest + 1))
    finally:
        running.end()
    check(log, groups, config)
    assert log.commits >= 10


def test_a_restart_goes_on_where_the_log_ends(make_group: MakeGroup) -> None:
    log = MemoryLog(TOPICS)
    config = PackConfig(groups_per_step=2, max_lag_versions=0, max_steps_ahead=0)
    first, stale = make_group(0), make_group(1, lineage="0197a1b2-0000-7000-8000-0000000000bb")
    send(log, version_event(0), first, stale)
    running = Running(log, config)
    running.until(lambda: len(read(log, "group-fates")) == 1)
    running.end()
    second, third = make_group(2), make_group(3)
    send(log, second, third)
    running = Running(log, config)
    running.until(lambda: len(read(log, "packed-batches")) == 1)
    # The third would be one version too old for step 2, whenever that comes.
    running.until(lambda: len(read(log, "group-fates")) == 4)
    running.end()
    counted = Counter(f.reason for f in read(log, "group-fates") if isinstance(f, GroupFate))
    assert counted == {"lineage_abandoned": 1, "trained": 2, "stale": 1}
    assert len(read(log, "dead-letters")) == 1
    check(log, [first, stale, second, third], config)


def test_drops_above_a_waiting_group_are_known_lives_later(make_group: MakeGroup) -> None:
    log = MemoryLog({**TOPICS, "groups": 1})
    config = PackConfig(groups_per_step=2)
    alien = "0197a1b2-0000-7000-8000-0000000000bb"
    groups = [make_group(0), *(make_group(n, lineage=alien) for n in (1, 2, 3))]
    send(log, version_event(0), groups[0])
    for life, group in enumerate(groups[1:], 1):
        send(log, group)
        running = Running(log, config)
        running.until(partial(_fates_are, log, life))
        running.end()
        assert log.committed("t.pack", [TopicPartition("groups", 0)]) == {TopicPartition("groups", 0): 0}
    send(log, last := make_group(4))
    running = Running(log, config)
    running.until(partial(_fates_are, log, 5))
    running.end()
    check(log, [*groups, last], config)


def test_the_marks_follow_where_some_group_always_waits() -> None:
    """In a mix with more answers than plans take, there is never a moment at which nothing is decided above the oldest
    that waits: a restart must not have to read all fates for that."""
    clock = ManualClock()
    log = MemoryLog({**TOPICS, "groups": 1, "group-fates": 1}, clock)
    mix = CohortConfig(production_share=0.5, coverage_floor=0, max_age_s=1e6)
    config = PackConfig(groups_per_step=4, cohort=mix, max_lag_versions=100)
    fates = TopicPartition("group-fates", 0)
    quick = RuntimeConfig(idle_s=0, linger_ms=0, offsets_only_s=0)
    packing = drive(log, config, "t.", "policy", synthetic.LINEAGE)
    session: Session | None = None
    marks: list[int] = []
    sent = 0
    for step in range(1, 41):
        send(log, synthetic.version(step - 1, at_us=NOW_US))
        for live in (True, True, True, False, False):
            group_id = synthetic.group_id(clock.now_us(), sent)
            send(log, grouped(group_id, live=live, version=step - 1))
            sent += 1
        if session is None:
            session = Session(log, packing, quick, clock)
        for _ in range(4):
            session.turn()
        assert isinstance(session.step, PackStep)
        assert step < 3 or session.step.packer.decided_above
        marks.append(log.committed("t.pack.marks", [fates]).get(fates, 0))
        if step % 8 == 0:
            session.close()
            session = None
    end = log.end_offsets([fates])[fates]
    assert marks == sorted(marks)
    assert end // 4 < marks[-1] < end
    said = [fate.group_id for fate in read(log, "group-fates") if isinstance(fate, GroupFate)]
    assert len(set(said)) == len(said) == 160


def test_time_alone_settles_what_waits_for_too_long() -> None:
    """An answer that became too old, and a kind that waited long enough for the other one: nothing new has to come."""
    clock = ManualClock()
    log = MemoryLog({**TOPICS, "groups": 1, "group-fates": 1}, clock)
    mix = CohortConfig(production_share=0.5, max_age_s=60, max_wait_s=20)
    config = PackConfig(groups_per_step=4, cohort=mix)
    quick = RuntimeConfig(idle_s=0, linger_ms=0, offsets_only_s=0, end_check_s=0)
    send(log, synthetic.version(0, at_us=NOW_US))
    old = synthetic.group_id(clock.now_us(), 0)
    send(log, grouped(old, live=True, version=0))
    for number in range(1, 6):
        send(log, grouped(synthetic.group_id(clock.now_us(), number), live=False, version=0))
    session = Session(log, drive(log, config, "t.", "policy", synthetic.LINEAGE), quick, clock)
    planned: list[int] = []
    fates: list[int] = []
    for _ in range(7):
        for _ in range(3):
            session.turn()
        planned.append(len(read(log, "packed-batches")))
        fates.append(len(read(log, "group-fates")))
        clock.advance(10.0)
    assert planned == [0, 0, 1, 1, 1, 1, 1]  # 20 s after the fourth of its kind came
    assert fates == [0, 0, 4, 4, 4, 4, 4]
    clock.advance(0.001)
    session.turn()
    last = read(log, "group-fates")[-1]
    assert isinstance(last, GroupFate)
    assert (last.group_id, last.reason) == (old, "too_old")
    groups = TopicPartition("groups", 0)
    assert log.committed("t.pack", [groups]) == {
        groups: 5
    }  # behind the five that are decided: one group waits
    session.close()


def grouped(group_id: str, *, live: bool, version: int) -> Group:
    """A group as either instance of assemble writes it."""
    if live:
        answer = synthetic.answer(group_id, at_us=NOW_US, version=version)
        rollouts = [Rollout(**{name: getattr(answer, name) for name in Rollout.__struct_fields__})]
    else:
        rollouts = [synthetic.rollout(group_id, i, 2, at_us=NOW_US, version=version) for i in range(2)]
    reward = float(int(group_id[-2:], 16) % 2)
    return Group(
        group_id=group_id,
        model="policy",
        lineage=synthetic.LINEAGE,
        environment=rollouts[0].environment,
        task_id=rollouts[0].task_id,
        group_size=len(rollouts),
        baseline="cohort" if live else "mean",
        members=tuple(
            Member(
                rollout=rollout,
                reward=reward if live else float(i),
                advantage=None if live else i - 0.5,
                trace=None,
                signals=int(live),
            )
            for i, rollout in enumerate(rollouts)
        ),
        cut=Cut(inputs=(), clock_us=NOW_US),
    )


def _fates_are(log: MemoryLog, count: int) -> bool:
    return len(read(log, "group-fates")) >= count


def test_the_second_pack_stands_by_until_the_first_ends(make_group: MakeGroup) -> None:
    log, config = MemoryLog(TOPICS), PackConfig(groups_per_step=1)
    send(log, version_event(0))
    first = Running(log, config)
    send(log, make_group(0))
    first.until(lambda: len(read(log, "packed-batches")) == 1)
    second = Running(log, config)
    send(log, version_event(1), make_group(1))
    second.until(lambda: len(read(log, "packed-batches")) == 2)
    first.end()
    send(log, version_event(2), make_group(2))
    second.until(lambda: len(read(log, "packed-batches")) == 3)
    second.end()
    assert first.error is None
    assert second.error is None
    check(log, [make_group(n) for n in range(3)], config)


def test_the_last_step_is_found_below_control_records_and_other_lineages(make_group: MakeGroup) -> None:
    log, config = MemoryLog(TOPICS), PackConfig(groups_per_step=1, max_steps_ahead=3)
    send(log, version_event(0), *[make_group(i) for i in range(3)])
    running = Running(log, config)
    running.until(lambda: len(read(log, "packed-batches")) == 3)
    running.end()
    last = [b for b in read(log, "packed-batches") if isinstance(b, PackedBatch)][-1]
    other = msgspec.structs.replace(last, lineage="0197a1b2-0000-7000-8000-0000000000bb", step=9)
    for _ in range(40):
        send(log, other)
    writer = log.transactional_writer("aborting")
    for _ in range(40):
        writer.begin()
        writer.write([outgoing(other, source="test", time_us=NOW_US)])
        writer.abort()
    for lineage, planned in ((LINEAGE, 3), (other.lineage, 9), ("0197a1b2-0000-7000-8000-0000000000cc", 0)):
        session = Session(
            log, drive(log, config, f"{lineage}.", "policy", lineage), RuntimeConfig(), SystemClock()
        )
        session.close()
        assert isinstance(session.step, PackStep)
        assert session.step.packer.next_step == planned + 1


def test_more_ranks_than_partitions_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="8 partitions"):
        run_pack(
            MemoryLog(TOPICS),
            PackConfig(ranks=9),
            prefix="t.",
            model="policy",
            lineage=LINEAGE,
            stop=threading.Event(),
        )


def test_a_plan_that_fits_no_record_halts_pack_and_sets_no_group_aside(make_group: MakeGroup) -> None:
    log, config = MemoryLog(TOPICS), PackConfig(groups_per_step=1, token_budget=300_000)
    send(log, version_event(0), make_group(0, lengths=(260_000, 260_000)))
    quick = RuntimeConfig(idle_s=0, linger_ms=0)
    for life in "abcd":  # a supervisor starts it again and again
        session = Session(log, drive(log, config, "t.", "policy", LINEAGE), quick, SystemClock(), life=life)
        with pytest.raises(ConfigError, match="does not fit a record"):
            session.turn()
        session.close()
    assert read(log, "dead-letters") == []
