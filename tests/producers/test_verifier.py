"""The verifier on the in-memory log: exactly once, whatever fails and whenever; a bad rollout stops no good one."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from rollwire.producers.emit import decode_record, outgoing
from rollwire.producers.environments.countdown import END_ID, Countdown, encode_text
from rollwire.producers.trajectory import Origin, Trajectory
from rollwire.producers.verifier.judging import RecentIds, offsets_before, sampled_ids
from rollwire.producers.verifier.sandbox import SandboxConfig
from rollwire.producers.verifier.verifier import VerifierConfig, VerifierReport, run_verifier, target_of
from rollwire.schemas.errors import EnvironmentMissing, Fenced, LogUnavailable, OffsetLost, TransactionUnknown
from rollwire.schemas.ids import new_group_id
from rollwire.schemas.records import Reward, Rollout, Segment
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.engine import Sampled
from rollwire.streams.seams.environment import Task
from rollwire.streams.seams.forwarding import ForwardingTransactions
from rollwire.streams.seams.log import Outgoing, Record, TopicPartition, TransactionalWriter
from rollwire.streams.seams.log_memory import MemoryLog

NOW_US = 1_767_225_600_000_000
TOPICS = {"rollouts": 4, "rewards": 4}
ORIGIN = Origin(
    "policy", "0197a1b2-0000-7000-8000-0000000000aa", "countdown", "fleet", "fleet-0", "u1", 1.0, 8, None
)
QUICK = VerifierConfig(poll_s=0.05, retry_s=0.05, sandbox=SandboxConfig(answer_s=0.5))


def rollout(
    number: int, index: int = 0, *, text: str | None = None, origin: Origin = ORIGIN, reason: str = "stop"
) -> Rollout:
    """Member `index` of group `number`, answering `text` (None: the right answer where the index is even)."""
    task = Countdown().reset(number)
    ids_S = np.append(encode_text("1+2" if text is None else text), END_ID)
    one = Trajectory(new_group_id(NOW_US, number), index, 8, task, number, NOW_US)
    ones_S = np.full(ids_S.size, -0.5, dtype=np.float32)
    one.add_sampled(Sampled("", ids_S, ones_S, np.zeros(ids_S.size, dtype=np.int64), None, reason))
    finished = one.finish(origin, reason, NOW_US).rollout
    assert finished is not None
    return finished


def write(log: MemoryLog, rollouts: Sequence[Rollout]) -> None:
    log.writer().write([outgoing(each, source="test", time_us=NOW_US) for each in rollouts])


def read(log: MemoryLog, topic: str) -> list[Record]:
    reader = log.reader()
    reader.assign({TopicPartition(topic, p): 0 for p in range(log.partitions(topic))})
    records: list[Record] = []
    while more := reader.poll(10_000, 0.0):
        records += more
    return records


def rewards(log: MemoryLog) -> list[Reward]:
    events = [decode_record(record) for record in read(log, "rewards")]
    return [event for event in events if isinstance(event, Reward)]


class Running:
    def __init__(self) -> None:
        self.stop = threading.Event()
        self.report: VerifierReport | None = None
        self.error: Exception | None = None


@contextmanager
def verifier(
    log: MemoryLog, config: VerifierConfig = QUICK, *, target: str | None = None
) -> Iterator[Running]:
    running = Running()

    def run() -> None:
        try:
            running.report = run_verifier(
                log, Countdown(), config, prefix="t.", stop=running.stop, target=target
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


def until(holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    tick = threading.Event()
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        tick.wait(0.01)


def test_every_rollout_gets_the_reward_of_its_answer() -> None:
    log = MemoryLog(TOPICS)
    countdown = Countdown()
    written = [rollout(n, i, text="1+2" if i else "(1") for n in range(20) for i in range(4)]
    write(log, written)
    with verifier(log) as running:
        until(lambda: len(rewards(log)) == 80)
    assert running.error is None
    by_id = {reward.rollout_id: reward for reward in rewards(log)}
    assert len(by_id) == 80
    for each in written:
        verdict = countdown.score(each.task, sampled_ids(each), each.finish_reason)
        reward = by_id[each.rollout_id]
        assert reward.reward == verdict.reward
        assert reward.outcome == verdict.outcome
        assert tuple((c.name, c.value) for c in reward.components) == verdict.components
        assert (reward.source, reward.verifier, reward.verifier_version) == (
            "verifier",
            "countdown-exact",
            "1",
        )
    # Rewards lie where their rollouts lie: the two topics are joined by partition.
    partitions = {record.key: record.partition for record in read(log, "rollouts")}
    assert all(partitions[record.key] == record.partition for record in read(log, "rewards"))


def test_a_right_answer_is_worth_one() -> None:
    log = MemoryLog(TOPICS)
    demos = Countdown().demonstrations(30, seed=1)
    countdown = Countdown()
    right: list[Rollout] = []
    for number in range(30):
        prompt = int(np.flatnonzero(demos.loss_mask_NW[number])[0])
        text = countdown.decode(demos.tokens_NW[number, :prompt])
        numbers, target = text.split("=")
        a, b, c = numbers.split(" ")
        task = Task(
            "t", f'{{"numbers":[{a},{b},{c}],"target":{target.strip()}}}', demos.tokens_NW[number, :prompt]
        )
        ids_S = demos.tokens_NW[number, prompt : demos.lengths_N[number]]
        one = Trajectory(new_group_id(NOW_US, number), 0, 8, task, number, NOW_US)
        logp_S = np.full(ids_S.size, -0.5, dtype=np.float32)
        one.add_sampled(Sampled("", ids_S, logp_S, np.zeros(ids_S.size, dtype=np.int64), None, "stop"))
        finished = one.finish(ORIGIN, "stop", NOW_US).rollout
        assert finished is not None
        right.append(finished)
    write(log, right)
    with verifier(log):
        until(lambda: len(rewards(log)) == 30)
    assert Counter(reward.outcome for reward in rewards(log)) == {"right": 30}


def test_bad_and_foreign_rollouts_are_passed_over_and_the_good_go_on() -> None:
    log = MemoryLog(TOPICS)
    good = [rollout(n) for n in range(12)]
    write(log, good[:6])
    poison = [
        Outgoing("rollouts", b"x", None),
        Outgoing("rollouts", b"x", b""),
        Outgoing("rollouts", b"x", b"hello"),
        Outgoing("rollouts", None, bytes(1_000)),
        outgoing(rollout(99), source="test", time_us=NOW_US)._replace(key=b"another"),
    ]
    log.writer().write(poison)
    write(log, [rollout(50, origin=ORIGIN._replace(environment="chess"))])
    write(log, [good[0]])  # a producer's repeat
    write(log, good[6:])
    with verifier(log) as running:
        until(lambda: len(rewards(log)) >= 12)
        write(log, [good[1]])  # and one in a later batch
        write(log, [rollout(13)])
        until(lambda: len(rewards(log)) >= 13)
    assert running.report is not None
    assert running.report.skips._asdict() == {"refused": 5, "foreign": 1, "repeats": 2}
    assert running.report.scored == 13
    assert len({reward.rollout_id for reward in rewards(log)}) == len(rewards(log)) == 13


def test_c09_an_aborted_rollout_is_unscorable_not_zero() -> None:
    log = MemoryLog(TOPICS)
    write(log, [rollout(1, reason="abort")])
    with verifier(log) as running:
        until(lambda: len(rewards(log)) == 1)
    assert rewards(log)[0].reward is None
    assert rewards(log)[0].outcome == "aborted"
    assert running.report is not None
    assert running.report.unscorable == 1


HANGING = """
from rollwire.producers.environments.countdown import Countdown

class Hanging(Countdown):
    def score(self, task, sampled_ids, finish_reason):
        text = self.decode(sampled_ids[:-1])
        while text == "9": pass
        if text == "8": raise MemoryError
        return super().score(task, sampled_ids, finish_reason)
"""


def test_c09_answers_that_hang_or_kill_cost_one_reward_each(tmp_path: Path) -> None:
    """C09: null, never 0; the others of the group are scored."""
    path = tmp_path / "hanging.py"
    path.write_text(HANGING)
    log = MemoryLog(TOPICS)
    texts = ["1+2", "9", "1+2", "8", "1+2"]
    write(log, [rollout(1, index, text=text) for index, text in enumerate(texts)])
    with verifier(log, target=f"{path}:Hanging") as running:
        until(lambda: len(rewards(log)) == 5)
    by_text = {texts[int(r.rollout_id.rsplit(".")[-1])]: r for r in rewards(log)}
    assert by_text["9"].reward is None
    assert by_text["8"].reward is None
    assert by_text["1+2"].reward == 0.0
    assert by_text["9"].outcome == "unscorable"
    assert running.report is not None
    assert running.report.unscorable == 2
    assert running.report.evaluator_restarts == 4


def test_a_flood_of_hanging_answers_stops_in_time_and_loses_none(tmp_path: Path) -> None:
    path = tmp_path / "hanging.py"
    path.write_text(HANGING)
    log = MemoryLog(TOPICS)
    write(log, [rollout(n, text="9" if n % 2 else "1+2") for n in range(40)])
    config = VerifierConfig(poll_s=0.05, batch_s=0.5, sandbox=SandboxConfig(answer_s=0.2))
    with verifier(log, config, target=f"{path}:Hanging") as running:
        until(lambda: len(rewards(log)) >= 2)
        began = time.monotonic()
        running.stop.set()
    assert time.monotonic() - began < 10.0
    assert running.error is None
    partial = len(rewards(log))
    assert 2 <= partial < 40
    with verifier(log):  # a sound evaluator takes over where the other one stopped
        until(lambda: len(rewards(log)) == 40)
    ids = Counter(reward.rollout_id for reward in rewards(log))
    assert len(ids) == 40
    assert set(ids.values()) == {1}


class DoubtfulLog(MemoryLog):
    """Each third commit raises in doubt: every other time it had succeeded, every other time it had not."""

    def __init__(self) -> None:
        super().__init__(TOPICS)
        self.commits = 0

    def transactional_writer(self, transactional_id: str, timeout_s: float = 60.0) -> TransactionalWriter:
        return DoubtfulWriter(self, super().transactional_writer(transactional_id, timeout_s))


class DoubtfulWriter(ForwardingTransactions):
    def __init__(self, log: DoubtfulLog, inner: TransactionalWriter) -> None:
        super().__init__(inner)
        self._log = log

    def commit(
        self,
        group: str,
        offsets: Mapping[TopicPartition, int],
        timeout_s: float = 30.0,
        *,
        also: Mapping[str, Mapping[TopicPartition, int]] | None = None,
    ) -> None:
        self._log.commits += 1
        turn = self._log.commits % 6
        if turn == 3:
            raise TransactionUnknown("nothing was committed, but who knows")
        self._inner.commit(group, offsets, timeout_s, also=also)
        if turn == 0:
            raise TransactionUnknown("it was committed, but who knows")


def test_doubtful_commits_lose_nothing_and_repeat_nothing() -> None:
    log = DoubtfulLog()
    write(log, [rollout(n) for n in range(60)])
    config = QUICK.model_copy(update={"max_batch": 4})
    with verifier(log, config) as running:
        until(lambda: len({r.rollout_id for r in rewards(log)}) == 60)
    assert running.error is None
    assert running.report is not None
    assert running.report.recoveries >= 4
    assert len(rewards(log)) == 60


def test_scoring_again_gives_the_same_bytes() -> None:
    """Law 9: the same records on another log, scored by another process."""
    logs = (MemoryLog(TOPICS), MemoryLog(TOPICS))
    write(logs[0], [rollout(n) for n in range(10)])
    # The second log is the first one's copy, record times included.
    for record in read(logs[0], "rollouts"):
        at = TopicPartition(record.topic, record.partition)
        logs[1]._at(at).entries.append(record)
    for log in logs:
        with verifier(log):
            until(lambda log=log: len(rewards(log)) == 10)  # type: ignore[misc]
    first, second = (sorted((r.key, r.value, r.headers) for r in read(log, "rewards")) for log in logs)
    assert first == second


def test_a_second_verifier_takes_over_and_the_first_one_stops() -> None:
    log = MemoryLog(TOPICS)
    with verifier(log) as first:
        write(log, [rollout(n) for n in range(4)])
        until(lambda: len(rewards(log)) == 4)
        with verifier(log) as second:
            write(log, [rollout(n) for n in range(4, 8)])
            until(lambda: len(rewards(log)) == 8)
            write(log, [rollout(n) for n in range(8, 12)])
            until(lambda: first.error is not None)
        assert second.error is None
    assert isinstance(first.error, Fenced)
    assert len(rewards(log)) == len({r.rollout_id for r in rewards(log)}) == 12


def test_c45_a_record_with_an_absurd_time_stops_nobody() -> None:
    clock = ManualClock(now_us=1_000)  # 1970, as from a producer that took seconds for milliseconds (C45)
    log = MemoryLog(TOPICS, clock)
    write(log, [rollout(1)])
    clock.advance(NOW_US / 1e6)
    write(log, [rollout(2), rollout(3)])
    with verifier(log) as running:
        until(lambda: len(rewards(log)) == 2)
    assert running.error is None
    assert running.report is not None
    assert running.report.scored == 2
    assert running.report.skips.refused == 1


def test_offsets_that_are_gone_halt_it() -> None:
    log = MemoryLog(TOPICS)
    partition = TopicPartition("rollouts", 0)
    log.set_committed("t.verifier", partition, 5)
    with verifier(log) as running:
        until(lambda: running.error is not None)
    assert isinstance(running.error, OffsetLost)


class GoneLog(MemoryLog):
    def transactional_writer(self, transactional_id: str, timeout_s: float = 60.0) -> TransactionalWriter:
        raise LogUnavailable("the broker is away")


def test_the_broker_gone_for_good_is_an_error() -> None:
    config = QUICK.model_copy(update={"patience_s": 0.3})
    with verifier(GoneLog(TOPICS), config) as running:
        until(lambda: running.error is not None)
    assert isinstance(running.error, LogUnavailable)


def test_an_evaluator_that_does_not_start_is_named() -> None:
    log = MemoryLog(TOPICS)
    write(log, [rollout(1)])
    with verifier(log, target="rollwire.nowhere:Nothing") as running:
        until(lambda: running.error is not None)
    assert isinstance(running.error, EnvironmentMissing)
    assert rewards(log) == []


def test_it_keeps_up_with_a_fleet() -> None:
    log = MemoryLog(TOPICS)
    write(log, [rollout(n % 500, n // 500, text="(1+2)*3") for n in range(4_000)])
    with verifier(log, VerifierConfig()):
        until(lambda: log.end_offsets([TopicPartition("rewards", 0)])[TopicPartition("rewards", 0)] > 0)
        began = time.monotonic()
        ends = [TopicPartition("rewards", p) for p in range(4)]
        until(lambda: sum(log.end_offsets(ends).values()) >= 4_000, timeout_s=20.0)
        took = time.monotonic() - began
    assert len(rewards(log)) == 4_000
    assert took < 8.0  # a busy machine; an idle one takes well under 1 s


def test_the_sampled_tokens_are_those_of_all_sampled_segments() -> None:
    base = rollout(1)
    parts: Sequence[tuple[str, int, int]] = [
        ("prompt", 0, 2),
        ("sampled", 2, 4),
        ("tool", 4, 5),
        ("sampled", 5, 6),
    ]
    segments = tuple(Segment(kind=k, start=s, end=e) for k, s, e in parts)  # type: ignore[arg-type]
    for dtype in ("u1", "u2", "u4"):
        token_ids = np.arange(6).astype(f"<{dtype}").tobytes()
        fields = {f: getattr(base, f) for f in base.__struct_fields__}
        changed = Rollout(**{**fields, "segments": segments, "token_ids": token_ids, "token_dtype": dtype})
        assert sampled_ids(changed).tolist() == [2, 3, 5]
        assert sampled_ids(changed).dtype == np.int64


def test_offsets_stop_at_the_first_unhandled_record_of_each_partition() -> None:
    zero, one = TopicPartition("rollouts", 0), TopicPartition("rollouts", 1)
    open_ = [Record("rollouts", 0, offset, 0, None, None, ()) for offset in (7, 8)]
    assert offsets_before({zero: 12, one: 5}, open_) == {zero: 7, one: 5}
    assert offsets_before({zero: 12, one: 5}, []) == {zero: 12, one: 5}


def test_remembered_ids_are_bounded() -> None:
    recent = RecentIds(3)
    recent.add(f"r{n}" for n in range(5))
    assert [f"r{n}" in recent for n in range(5)] == [False, False, True, True, True]
    recent.clear()
    assert "r4" not in recent


def test_the_evaluator_builds_the_class_of_the_environment() -> None:
    assert target_of(Countdown()) == "rollwire.producers.environments.countdown:Countdown"
