"""The fleet on the in-memory log and engine: slots, swaps, restarts, hand-back."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from rollwire.producers.emit import decode_record, outgoing
from rollwire.producers.environments.countdown import Countdown
from rollwire.producers.fleet import FleetConfig, FleetReport, run_fleet
from rollwire.producers.slots import SlotCounts
from rollwire.schemas.errors import DeadlineExceeded, LogUnavailable
from rollwire.schemas.records import Cut, Event, Fate, GroupFate, Rollout, RoutingTrace
from rollwire.streams.seams.engine import Sampled
from rollwire.streams.seams.engine_memory import MemoryEngine
from rollwire.streams.seams.log import Outgoing, Reader, Record, TopicPartition, Writer
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.weights_memory import MemoryWeights

LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"
TOPICS = {"rollouts": 4, "rewards": 4, "routing-traces": 4, "group-fates": 4}


class Running:
    """A fleet in a thread, and what its observer saw."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.counts: list[SlotCounts] = []
        self.report: FleetReport | None = None
        self.error: Exception | None = None


@contextmanager
def fleet(
    log: MemoryLog,
    config: FleetConfig,
    *,
    engine: MemoryEngine | None = None,
    weights: MemoryWeights | None = None,
) -> Iterator[Running]:
    running = Running()
    environment = Countdown()
    if weights is None:
        weights = MemoryWeights()
        weights.offer(0, {})
    engine = engine or memory_engine()

    def observe(counts: SlotCounts) -> None:
        if not running.counts or running.counts[-1] != counts:
            running.counts.append(counts)

    def run() -> None:
        try:
            running.report = run_fleet(
                log,
                engine,
                environment,
                weights,
                config,
                model="policy",
                lineage=LINEAGE,
                prefix="t.",
                stop=running.stop,
                observe=observe,
            )
        except Exception as error:  # noqa: BLE001  # the thread's edge: the test looks at it
            running.error = error

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield running
    finally:
        running.stop.set()
        thread.join(20.0)
        assert not thread.is_alive()


def memory_engine(max_running: int = 512, end_bias: float = 1.0) -> MemoryEngine:
    return MemoryEngine(vocab_size=20, end_id=1, max_running=max_running, end_bias=end_bias)


class Tail:
    """Reads topics from their beginning, as they grow."""

    def __init__(self, log: MemoryLog, *topics: str) -> None:
        self._reader = log.reader()
        self._reader.assign({TopicPartition(t, p): 0 for t in topics for p in range(log.partitions(t))})
        self.events: list[Event] = []

    def until(self, holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, f"not within {timeout_s} s; {len(self.events)} events"
            self.events += [decode_record(record) for record in self._reader.poll(1_000, 0.05)]

    def drain(self) -> None:
        while records := self._reader.poll(1_000, 0.0):
            self.events += [decode_record(record) for record in records]

    @property
    def rollouts(self) -> list[Rollout]:
        return [event for event in self.events if isinstance(event, Rollout)]

    def whole_groups(self) -> list[str]:
        sizes = Counter(rollout.group_id for rollout in self.rollouts)
        first = {rollout.group_id: rollout.group_size for rollout in self.rollouts}
        return [group_id for group_id in first if sizes[group_id] == first[group_id]]


def decide(log: MemoryLog, group_ids: Sequence[str], fate: Fate, reason: str = "trained") -> None:
    writer = log.writer()
    writer.write(
        [
            outgoing(
                GroupFate(
                    group_id=group_id,
                    fate=fate,
                    reason=reason,
                    detail="",
                    decided_by="assemble",
                    fleet="fleet",
                    replica="fleet-0",
                    members=(),
                    reward_mean=None,
                    group_size=8,
                    for_version=None,
                    oldest_version=None,
                    cut=Cut(inputs=(), clock_us=1_767_225_600_000_000),
                ),
                source="test",
                time_us=1_767_225_600_000_000,
            )
            for group_id in group_ids
        ]
    )


def test_c06_filtered_groups_give_their_slots_back() -> None:
    """C06: capacity 4; the first four groups are all filtered; four good ones arrive within 5 s."""
    log = MemoryLog(TOPICS)
    tail = Tail(log, "rollouts", "routing-traces")
    with fleet(log, FleetConfig(max_open_groups=4, group_size=4)) as running:
        tail.until(lambda: len(tail.whole_groups()) == 4)
        first = tail.whole_groups()
        tail.until(lambda: len(running.counts) > 0 and running.counts[-1].pending == 4)
        decide(log, first, "filtered", "equal_rewards")
        began = time.monotonic()
        tail.until(lambda: len(tail.whole_groups()) == 8, timeout_s=5.0)
        assert time.monotonic() - began < 5.0
        decide(log, [g for g in tail.whole_groups() if g not in first], "kept")
        tail.until(lambda: running.counts[-1].accepted == 4)
    assert running.error is None
    assert running.report is not None
    assert all(counts.balanced for counts in running.counts)
    assert max(counts.pending for counts in running.counts) == 4
    assert running.report.slots.filtered == 4
    assert running.report.slots.accepted == 4
    assert running.report.slots.submitted == len({rollout.group_id for rollout in _all(log)})


def _all(log: MemoryLog) -> list[Rollout]:
    tail = Tail(log, "rollouts")
    tail.drain()
    return tail.rollouts


def test_full_slots_stop_the_sampling() -> None:
    log = MemoryLog(TOPICS)
    tail = Tail(log, "rollouts")
    with fleet(log, FleetConfig(max_open_groups=3, group_size=2)) as running:
        tail.until(lambda: len(tail.whole_groups()) == 3)
        # Fates of strangers and of earlier lives free nothing.
        decide(log, ["0197a1b2-0000-7000-8000-000000000001"], "kept")
        decide(log, [tail.whole_groups()[0]], "dropped", "stale")
        tail.until(lambda: len(tail.whole_groups()) == 4)
        decide(log, [tail.whole_groups()[0]], "dropped", "stale")  # a repeat frees nothing either
    assert running.report is not None
    assert running.report.slots == SlotCounts(submitted=4, accepted=0, filtered=0, dropped=1, pending=3)
    assert len(_all(log)) == 8


def test_what_is_written_is_what_was_sampled() -> None:
    log = MemoryLog(TOPICS)
    engine = memory_engine()
    countdown = Countdown()
    tail = Tail(log, "rollouts", "routing-traces")
    with fleet(log, FleetConfig(max_open_groups=6, group_size=8), engine=engine) as running:
        tail.until(lambda: len(tail.whole_groups()) == 6)
    tail.drain()
    assert running.error is None
    traces = {event.rollout_id: event for event in tail.events if isinstance(event, RoutingTrace)}
    assert len(tail.rollouts) == len(traces) == 48
    for rollout in tail.rollouts:
        ids_T = np.frombuffer(rollout.token_ids, np.uint8).astype(np.int64)
        start = rollout.segments[1].start
        assert countdown.decode(ids_T[:start]).endswith(" ")
        # Honest logprobs: each is the engine's own for that token after the one before it.
        for at, logprob in zip(range(start, ids_T.size), np.frombuffer(rollout.logprobs, "<f4"), strict=True):
            assert logprob == np.float32(engine.log_probabilities(0, int(ids_T[at - 1]))[ids_T[at]])
        assert rollout.top_k_experts == traces[rollout.rollout_id].top_k == 2
        assert traces[rollout.rollout_id].rows == ids_T.size - 1
    by_group = {
        rollout.group_id: {r.index for r in tail.rollouts if r.group_id == rollout.group_id}
        for rollout in tail.rollouts
    }
    assert all(indices == set(range(8)) for indices in by_group.values())
    assert len({rollout.seed for rollout in tail.rollouts}) == 48
    for group_id in by_group:
        assert len({rollout.task_id for rollout in tail.rollouts if rollout.group_id == group_id}) == 1


def test_swaps_in_flight_make_spans_and_drop_nothing() -> None:
    log = MemoryLog(TOPICS)
    weights = MemoryWeights()
    weights.offer(0, {})

    class Offering(MemoryEngine):
        """Offers the next version every second step, as a busy trainer would."""

        steps = 0

        def step(self) -> list[Sampled]:
            self.steps += 1
            if self.steps % 2 == 0:
                weights.offer(self.version + 1, {})
            return super().step()

    engine = Offering(vocab_size=20, end_id=1, max_running=64, end_bias=0.0)
    tail = Tail(log, "rollouts")
    with fleet(log, FleetConfig(max_open_groups=8, group_size=8), engine=engine, weights=weights) as running:
        tail.until(lambda: len(tail.whole_groups()) == 8)
    assert running.error is None
    mixed = [rollout for rollout in tail.rollouts if len(rollout.spans) > 1]
    assert len(tail.rollouts) == 64
    assert len(mixed) > 32
    for rollout in mixed:
        versions = [span.version for span in rollout.spans]
        assert versions == list(range(versions[0], versions[0] + len(versions)))
    assert [swap.version for swap in weights.swaps] == list(range(len(weights.swaps)))
    assert all(swap.pause_ms >= 0 for swap in weights.swaps)
    assert any(swap.open_rollouts > 0 for swap in weights.swaps)
    assert weights.stopped_with == 0


def test_a_stop_finishes_what_is_open() -> None:
    log = MemoryLog(TOPICS)
    with fleet(log, FleetConfig(max_open_groups=4, group_size=8)) as running:
        tail = Tail(log, "rollouts")
        tail.until(lambda: len(tail.rollouts) > 0)
        running.stop.set()
    assert running.report is not None
    assert running.report.handed_back == 0
    rollouts = _all(log)
    assert len(rollouts) == running.report.written == 8 * running.report.slots.submitted
    assert {rollout.finish_reason for rollout in rollouts} <= {"stop", "length"}


class Endless(MemoryEngine):
    """Never ends a request by itself, as on a task whose answers are very long."""

    def step(self) -> list[Sampled]:
        time.sleep(0.001)
        for each in self._active:
            each.request = each.request._replace(max_new_tokens=10**9)
        return super().step()


def test_a_stop_hands_back_what_does_not_end_in_time() -> None:
    log = MemoryLog(TOPICS)
    engine = Endless(vocab_size=20, end_id=1, max_running=16, end_bias=-1e9)
    weights = MemoryWeights()
    weights.offer(0, {})
    config = FleetConfig(max_open_groups=4, group_size=4, drain_s=0.5, record_routes=False)
    with fleet(log, config, engine=engine, weights=weights) as running:
        deadline = time.monotonic() + 5.0
        while not running.counts and time.monotonic() < deadline:
            running.stop.wait(0.01)
        began = time.monotonic()
        running.stop.set()
    assert time.monotonic() - began < 5.0
    assert running.error is None
    assert running.report is not None
    assert running.report.handed_back == 16
    assert weights.stopped_with == 16
    rollouts = _all(log)
    assert len(rollouts) == 16
    assert {rollout.finish_reason for rollout in rollouts} == {"abort"}
    assert all(len(rollout.logprobs) > 0 for rollout in rollouts)


def test_a_first_life_follows_from_its_seed_and_a_second_one_does_not_repeat_it() -> None:
    def tasks(log: MemoryLog, seed: int, groups: int) -> list[str]:
        before = {rollout.group_id for rollout in _all(log)}
        with fleet(log, FleetConfig(max_open_groups=groups, group_size=1, seed=seed)):
            tail = Tail(log, "rollouts")
            tail.until(lambda: len({r.group_id for r in tail.rollouts} - before) == groups)
        mine = {r.group_id: f"{r.task_id} {r.seed}" for r in _all(log) if r.group_id not in before}
        return sorted(mine.values())

    first_log = MemoryLog(TOPICS)
    first = tasks(first_log, 7, 20)
    assert first == tasks(MemoryLog(TOPICS), 7, 20)
    assert first != tasks(MemoryLog(TOPICS), 8, 20)
    second = tasks(first_log, 7, 20)
    assert not set(first) & set(second)
    ids = [rollout.rollout_id for rollout in _all(first_log)]
    assert len(ids) == len(set(ids)) == 40


def test_no_version_no_sampling() -> None:
    log = MemoryLog(TOPICS)
    with pytest.raises(DeadlineExceeded):
        run_fleet(
            log,
            memory_engine(),
            Countdown(),
            MemoryWeights(),
            FleetConfig(start_s=0.2),
            model="policy",
            lineage=LINEAGE,
            prefix="t.",
            stop=threading.Event(),
        )
    assert _all(log) == []


class FlakyLog(MemoryLog):
    """Its writers lose the broker after the records are durable: the outcome is unknown."""

    def __init__(self, failures: int) -> None:
        super().__init__(TOPICS)
        self.failures = failures

    def writer(self) -> Writer:
        outer, inner = self, super().writer()

        class Flaky:
            def write(self, records: Sequence[Outgoing], timeout_s: float = 30.0) -> None:
                inner.write(records, timeout_s)
                if outer.failures > 0:
                    outer.failures -= 1
                    raise LogUnavailable("the acknowledgement was lost")

            def close(self) -> None:
                inner.close()

        return Flaky()


def test_an_unknown_outcome_is_written_again_with_equal_ids_and_bytes() -> None:
    log = FlakyLog(failures=2)
    with fleet(log, FleetConfig(max_open_groups=4, group_size=8)) as running:
        tail = Tail(log, "rollouts")
        tail.until(lambda: log.failures == 0 and running.counts[-1].pending == 4)
        tail.until(lambda: len({r.rollout_id for r in tail.rollouts}) == 32)
    assert running.error is None
    assert running.report is not None
    assert running.report.written == 32
    rollouts = _all(log)
    assert len(rollouts) > 32
    assert len(set(rollouts)) == len({rollout.rollout_id for rollout in rollouts}) == 32


def test_the_broker_gone_for_good_is_an_error() -> None:
    log = FlakyLog(failures=10**9)
    with fleet(log, FleetConfig(max_open_groups=1, group_size=1, patience_s=0.6)) as running:
        deadline = time.monotonic() + 15.0
        while running.error is None and time.monotonic() < deadline:
            running.stop.wait(0.05)
    assert isinstance(running.error, LogUnavailable)


def test_a_rollout_that_the_codec_refuses_is_counted_and_its_slot_comes_back() -> None:
    class Nan(MemoryEngine):
        broken = 2

        def step(self) -> list[Sampled]:
            finished = super().step()
            for at, sampled in enumerate(finished):
                if self.broken > 0:
                    self.broken -= 1
                    finished[at] = sampled._replace(logprobs=np.full_like(sampled.logprobs, np.nan))
            return finished

    log = MemoryLog(TOPICS)
    engine = Nan(vocab_size=20, end_id=1)
    with fleet(log, FleetConfig(max_open_groups=1, group_size=2, max_running=2), engine=engine) as running:
        tail = Tail(log, "rollouts")
        tail.until(lambda: len(tail.whole_groups()) == 1)
    assert running.report is not None
    assert running.report.refused == 2
    assert running.report.slots.dropped == 1
    assert running.report.slots.submitted == 2


class AwayLog(MemoryLog):
    """Its readers lose the broker on their first polls."""

    def __init__(self, losses: int) -> None:
        super().__init__(TOPICS)
        self.losses = losses

    def reader(self) -> Reader:
        return AwayReader(self, super().reader())


class AwayReader:
    def __init__(self, log: AwayLog, inner: Reader) -> None:
        self._log = log
        self._inner = inner
        self.assign, self.seek = inner.assign, inner.seek
        self.pause, self.resume = inner.pause, inner.resume
        self.positions, self.close = inner.positions, inner.close

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        if self._log.losses > 0:
            self._log.losses -= 1
            raise LogUnavailable("the broker is away")
        return self._inner.poll(max_records, timeout_s)


def test_no_fate_is_missed_while_the_broker_is_away() -> None:
    log = AwayLog(losses=0)
    tail = Tail(log, "rollouts")
    with fleet(log, FleetConfig(max_open_groups=2, group_size=2)) as running:
        tail.until(lambda: len(tail.whole_groups()) == 2)
        log.losses = 3
        decide(log, tail.whole_groups(), "kept")
        deadline = time.monotonic() + 5.0
        while running.counts[-1].accepted < 2 and time.monotonic() < deadline:
            running.stop.wait(0.01)
        tail.until(lambda: len(tail.whole_groups()) == 4)
    assert running.error is None
    assert log.losses == 0
