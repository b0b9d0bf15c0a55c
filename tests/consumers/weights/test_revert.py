"""A revert on the twins in memory: what it writes, how trainers go on from it, and what it refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec
import pytest

from rollwire.consumers.packed_batches import PackedBatchReader
from rollwire.consumers.trainer.arithmetic import arithmetic_run
from rollwire.consumers.trainer.checkpoint_store import Checkpoint
from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.trainer.history import BATCHES, History, order_history, read_history
from rollwire.consumers.trainer.rehearsal import TOPICS, Rehearsal, write_plans
from rollwire.consumers.trainer.reversion import check_restorable
from rollwire.consumers.trainer.session import Session
from rollwire.consumers.trainer.sums import NOTHING, Sums, fold, state_of
from rollwire.consumers.version_publisher import VersionPublisher
from rollwire.consumers.weights.census import read_books, take_census
from rollwire.consumers.weights.collect import collect
from rollwire.consumers.weights.paths import delta_step, plan_path
from rollwire.consumers.weights.publisher import PublisherConfig
from rollwire.consumers.weights.reader import load_version
from rollwire.consumers.weights.retention import RetentionConfig, plan_retention
from rollwire.consumers.weights.revert import Reverting, RevertRun
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.policy.config import PolicyConfig
from rollwire.schemas.errors import Fenced, PlanViolation, TransactionUnknown, WeightError
from rollwire.schemas.records import Notice, PackedBatch, TrainStep, WeightVersion
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.reverts import Revert
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.log import Log, TopicPartition, TransactionalWriter
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store_memory import MemoryStore
from rollwire.streams.seams.work import Inline

LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"
SPEC = Rehearsal(PolicyConfig(num_hidden_layers=1, num_experts=2), LINEAGE, ranks=2, sequences=8)
CONFIG = TrainerConfig(ranks=2, checkpoint_every=2)
PARTITIONS = [TopicPartition(BATCHES, rank) for rank in range(2)]


class Bench:
    """One lineage; trainers and reverts run in this thread, one after the other."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.log: Log = MemoryLog({**TOPICS, "weight-links": 1}, self.clock)
        self.store = MemoryStore(self.clock)
        self.stop = threading.Event()

    def plans(self, steps: range, newest_revert: int | None = None, *, seed: int = 0) -> None:
        write_plans(self.log, SPEC._replace(seed=seed), steps, newest_revert=newest_revert)

    def trainer(self, until: int) -> tuple[Session, Inline]:
        work = Inline()
        run = arithmetic_run(
            self.log,
            self.store,
            CONFIG,
            prefix="t.",
            model="policy",
            lineage=LINEAGE,
            stop=self.stop,
            until_step=until,
            clock=self.clock,
            publisher_config=PublisherConfig(anchor_every=4),
            work=work,
        )
        return Session(run), work

    def train(self, until: int) -> None:
        session, work = self.trainer(until)
        for _ in range(2_000):
            turned = session.turn()
            while work.turn():
                pass
            if turned == "done":
                break
            self.clock.advance(0.01)
        else:
            raise AssertionError(f"step {until} was not taken")
        session.close()

    def reverting(self, to: int, log: Log | None = None) -> tuple[Reverting, Inline]:
        work = Inline()
        run = RevertRun(
            log or self.log,
            self.store,
            "t.",
            "policy",
            LINEAGE,
            to,
            "ann",
            "why",
            clock=self.clock,
            work=work,
        )
        return Reverting(run), work

    def revert(self, to: int, log: Log | None = None) -> WeightVersion:
        reverting, work = self.reverting(to, log)
        while reverting.turn() != "done":
            while work.turn():
                pass
            self.clock.advance(0.1)
        reverting.close()
        assert reverting.result is not None
        return reverting.result

    def history(self) -> History:
        return read_history(self.log, "policy", LINEAGE, deadline_s=5, clock=self.clock)

    def events(self, topic: str) -> Sequence[object]:
        return [decode_record(record) for record in scan(self.log, [topic])]

    def check(self) -> None:
        """Every version is in the store what its plans make of the version that it was made from."""
        history = self.history()
        slices: dict[str, list[PackedBatch]] = {}
        for event in self.events(BATCHES):
            assert isinstance(event, PackedBatch)
            slices.setdefault(event.plan_digest, []).append(event)
        sums: dict[int, Sums] = {0: NOTHING}
        for version, step in zip(history.versions[1:], history.steps, strict=True):
            if version.reverts_to is not None:
                sums[version.version] = sums[version.reverts_to]
            else:
                taken = sorted(slices[step.plan_digest], key=lambda one: one.rank)
                sums[version.version] = fold(sums[version.version - 1], taken)
        for version in history.versions:
            want = StateDigest.of(state_of(sums[version.version])).hex
            path = plan_path(history.versions, (), None, version.version)
            assert StateDigest.of(load_version(self.store, path, None)).hex == want == version.state_digest
        for before, after in pairwise(history.versions):
            if after.base_version is not None:
                path = plan_path(history.versions, (), None, before.version)
                state = load_version(self.store, path, None)
                found = load_version(self.store, [delta_step(after)], state)
                assert StateDigest.of(found).hex == after.state_digest
        stands = {TopicPartition(r.topic, r.partition): r.end for r in history.steps[-1].consumed}
        assert self.log.committed("t.trainer", PARTITIONS) == stands


def turns(session: Session, work: Inline) -> None:
    for _ in range(50):
        session.turn()
        work.turn()


def trained(steps: int, planned: int) -> Bench:
    bench = Bench()
    bench.plans(range(1, planned + 1))
    bench.train(steps)
    return bench


def test_a_revert_is_a_step_a_version_offsets_and_a_notice_in_one() -> None:
    bench = trained(5, planned=7)
    ends = bench.log.end_offsets(PARTITIONS)
    made = bench.revert(2)
    history = bench.history()
    assert (made.version, made.kind, made.reverts_to, made.base_version) == (6, "revert", 2, 5)
    assert made == history.versions[-1]
    assert made.state_digest == history.versions[2].state_digest
    step = history.steps[-1]
    assert (step.step, step.trained_tokens, step.settings["revert_to"], step.settings["by"]) == (
        6,
        0,
        "2",
        "ann",
    )
    assert {TopicPartition(r.topic, r.partition): r.end for r in step.consumed} == ends
    assert bench.log.committed("t.trainer", PARTITIONS) == ends
    notices = [n for n in bench.events("notices") if isinstance(n, Notice)]
    assert [(n.name, n.attributes["to"], n.attributes["why"]) for n in notices] == [("revert", "2", "why")]
    assert "versions 3 to 5 are abandoned" in notices[0].text
    bench.check()


@pytest.mark.parametrize("to", [1, 2, 3, 4])
def test_a_trainer_goes_on_from_the_older_state_with_a_checkpoint_or_without(to: int) -> None:
    bench = trained(5, planned=7)  # checkpoints at 0, 2 and 4; plans 6 and 7 are not taken
    made = bench.revert(to)
    assert (made.checkpoint is not None) is (to % 2 == 0)
    bench.plans(range(6, 9), seed=1)  # by a pack that has not heard of it
    bench.plans(range(7, 10), newest_revert=6, seed=2)
    bench.train(7)
    bench.train(9)  # a restart, from a checkpoint behind the revert where there is one by now
    history = bench.history()
    assert [v.version for v in history.versions] == list(range(10))
    assert [step.plan_digest for step in history.line(9)] == [
        *(step.plan_digest for step in history.steps[:to]),
        *(step.plan_digest for step in history.steps[5:]),
    ]
    bench.check()


def test_reverts_of_reverts_and_to_versions_that_were_given_up() -> None:
    bench = trained(5, planned=5)
    bench.revert(1)  # 6
    bench.revert(3)  # 7, which was given up
    bench.plans(range(8, 10), newest_revert=7)
    bench.train(9)
    made = bench.revert(6)
    assert made.state_digest == bench.history().versions[1].state_digest
    bench.plans(range(11, 12), newest_revert=10)
    bench.train(11)
    assert bench.history().reverts.known == (Revert(6, 1), Revert(7, 3), Revert(10, 6))
    bench.check()


def test_the_trainer_that_runs_is_fenced_and_commits_nothing_any_more() -> None:
    bench = trained(4, planned=5)
    session, work = bench.trainer(until=9)
    while session.turn() != "moved" or not work.ready():  # it has taken step 5, and its objects are due
        bench.clock.advance(0.01)
    bench.revert(2)
    with pytest.raises(Fenced):
        turns(session, work)
    assert bench.history().versions[-1].kind == "revert"
    bench.plans(range(6, 7), newest_revert=5)
    bench.train(6)
    bench.check()


def test_a_trainer_that_waits_for_plans_learns_of_it_from_the_first_one_that_knows() -> None:
    bench = trained(4, planned=4)
    session, work = bench.trainer(until=9)
    turns(session, work)
    bench.revert(2)
    bench.plans(range(6, 7), newest_revert=5)
    with pytest.raises(Fenced, match="version 5 was made by a revert"):
        turns(session, work)


@pytest.mark.parametrize(
    ("to", "said"),
    [(5, "is the newest"), (6, "known are 0 to 5"), (-1, "known are 0 to 5")],
)
def test_what_cannot_be_gone_back_to_is_refused_and_nobody_is_fenced(to: int, said: str) -> None:
    bench = trained(5, planned=6)
    session, work = bench.trainer(until=6)
    reverting, _ = bench.reverting(to)
    with pytest.raises(WeightError, match=said):
        reverting.turn()
    reverting.close()
    while session.turn() != "done":
        work.turn()
    session.close()
    assert bench.history().versions[-1].version == 6


def test_a_version_without_checkpoint_whose_plans_are_gone_is_refused_with_those_that_have_one() -> None:
    bench = trained(5, planned=5)
    assert isinstance(bench.log, MemoryLog)
    for partition in PARTITIONS:
        bench.log.trim(partition, bench.history().steps[3].consumed[partition.partition].start)
    reverting, _ = bench.reverting(3)
    with pytest.raises(WeightError, match="with a checkpoint of their own: 0, 2, 4"):
        reverting.turn()
    bench.revert(2)
    bench.plans(range(7, 8), newest_revert=6)
    bench.train(7)


def vector_keys(bench: Bench, version: int) -> list[str]:
    claim = bench.history().versions[version].checkpoint
    assert claim is not None
    checkpoint = msgspec.json.decode(bench.store.get(claim.key), type=Checkpoint)
    return [vector.key for vector in checkpoint.vectors.values()]


def test_a_trainer_that_slept_commits_nothing_that_the_collector_may_have_taken() -> None:
    """Between the last put and the transaction, for longer than anybody trusts an object that nothing names."""
    bench = trained(2, planned=3)
    session, work = bench.trainer(until=3)
    while not any(
        info.modified_us > bench.clock.now_us() - 1 for info in bench.store.list("weights/policy/manifests/")
    ):
        bench.clock.advance(1.0)
        session.turn()
        work.turn("snapshot-publisher")
    bench.clock.advance(30 * 3600)
    books = read_books(bench.log, topics=("weight-versions", "weight-links"))
    plan = plan_retention(take_census(bench.store, books), RetentionConfig(), bench.clock.now_us())
    assert plan.deletions
    collect(bench.log, bench.store, books, plan, RetentionConfig(), bench.clock)
    with pytest.raises(WeightError, match="were put 30 h ago"):
        turns(session, work)
    session.close()
    bench.train(3)
    bench.check()


@pytest.mark.parametrize("to", [2, 3])
def test_a_version_whose_checkpoint_was_deleted_is_refused_and_nobody_is_fenced(to: int) -> None:
    bench = trained(5, planned=6)
    for key in vector_keys(bench, 2):
        bench.store.delete(key)
    session, work = bench.trainer(until=6)
    reverting, _ = bench.reverting(to)
    with pytest.raises(WeightError, match="checkpoint of version 2 was deleted"):
        reverting.turn()
    reverting.close()
    while session.turn() != "done":
        work.turn()
    session.close()
    assert bench.history().versions[-1].version == 6


@pytest.mark.parametrize("to", [2, 3])
def test_a_collector_that_planned_before_the_revert_leaves_it_its_checkpoint(to: int) -> None:
    bench = trained(5, planned=5)
    bench.clock.advance(48 * 3600)
    config = RetentionConfig(keep_last=1)
    books = read_books(bench.log, topics=("weight-versions", "weight-links"))
    plan = plan_retention(take_census(bench.store, books), config, bench.clock.now_us())
    assert {verdict.info.key for verdict in plan.deletions} >= set(vector_keys(bench, 2))
    bench.revert(to)
    collect(bench.log, bench.store, books, plan, config, bench.clock)
    bench.plans(range(7, 8), newest_revert=6)
    bench.train(7)


def test_it_works_where_the_newest_version_cannot_be_read_any_more() -> None:
    bench = trained(3, planned=3)
    history = bench.history()
    for entry in history.versions[3].objects:
        bench.store.delete(entry.key)
    made = bench.revert(2)
    assert (made.kind, made.base_version) == ("revert", None)
    found = load_version(bench.store, plan_path([made], (), None, 4), None)
    assert StateDigest.of(found).hex == history.versions[2].state_digest
    bench.plans(range(5, 6), newest_revert=4)
    bench.train(5)


class Doubtful(MemoryLog):
    """The first commit is not answered; whether it came through is said by `done`."""

    def __init__(self, inner: MemoryLog, *, done: bool) -> None:
        self.__dict__.update(inner.__dict__)
        self.done = done
        self.doubts = 1

    def transactional_writer(self, transactional_id: str, timeout_s: float = 60.0) -> TransactionalWriter:
        writer = super().transactional_writer(transactional_id, timeout_s)
        if self.doubts:
            self.doubts -= 1
            commit = writer.commit

            def unanswered(group: str, offsets: dict[TopicPartition, int], timeout_s: float = 30.0) -> None:
                if self.done:
                    commit(group, offsets, timeout_s)
                raise TransactionUnknown("no answer")

            writer.commit = unanswered  # type: ignore[assignment, method-assign]
        return writer


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("planned", [5, 7])
def test_a_transaction_in_doubt_is_made_once(done: bool, planned: int) -> None:
    """With five plans no offset moves by the revert: what became of it, the version tells."""
    bench = trained(5, planned=planned)
    assert isinstance(bench.log, MemoryLog)
    made = bench.revert(2, Doubtful(bench.log, done=done))
    assert made.version == 6
    assert len(bench.events("weight-versions")) == 7
    bench.check()


def test_a_history_whose_revert_is_another_state_is_refused() -> None:
    bench = trained(3, planned=3)
    bench.revert(1)
    history = bench.history()
    wrong = msgspec.structs.replace(history.versions[4], reverts_to=2)
    with pytest.raises(PlanViolation, match="reverts to 2 and is another state"):
        order_history([*history.versions[:4], wrong], history.steps)


def test_what_a_revert_says_of_itself_passes_the_codec() -> None:
    bench = trained(2, planned=2)
    bench.revert(0)
    step = bench.events("train-steps")[-1]
    assert isinstance(step, TrainStep)
    assert step.loss != step.loss  # measured nothing
    assert (step.sequences, step.groups, step.learning_rate) == (0, 0, 0.0)


class Stepwise(MemoryLog):
    """Asked for committed offsets, it lets `meanwhile` happen first."""

    def __init__(self, inner: MemoryLog, meanwhile: Callable[[], object]) -> None:
        self.__dict__.update(inner.__dict__)
        self._meanwhile: Callable[[], object] | None = meanwhile

    def committed(self, group: str, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        meanwhile, self._meanwhile = self._meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return super().committed(group, partitions)


def test_a_trainer_that_starts_while_the_lineage_is_taken_back_is_fenced() -> None:
    bench = trained(4, planned=6)
    inner = bench.log
    assert isinstance(inner, MemoryLog)

    def meanwhile() -> None:
        bench.log = inner
        bench.revert(2)

    bench.log = Stepwise(inner, meanwhile)
    session, _ = bench.trainer(until=9)
    with pytest.raises(Fenced, match="went on while this one started"):
        session.turn()
    session.close()


def test_an_onlooker_leaves_out_what_is_committed_while_it_reads() -> None:
    bench = trained(3, planned=3)
    later = bench.history().versions[3]
    writer = bench.log.writer()
    unpaired = msgspec.structs.replace(later, version=4, base_version=3, step=4)
    writer.write([outgoing(unpaired, source="test", time_us=bench.clock.now_us())])
    with pytest.raises(PlanViolation, match="5 versions, but train-steps"):
        bench.history()
    seen = read_history(bench.log, "policy", LINEAGE, deadline_s=5, clock=bench.clock, running=True)
    assert (seen.versions[-1], len(seen.steps)) == (later, 3)


def test_a_trainer_of_ones_own_reads_on_behind_a_revert() -> None:
    bench = trained(4, planned=6)
    bench.revert(2)
    bench.plans(range(6, 8), newest_revert=5)
    publisher = VersionPublisher(
        bench.log, bench.store, model="policy", lineage=LINEAGE, ranks=2, prefix="t.", clock=bench.clock
    )
    held = publisher.start(None)
    publisher.close()
    assert (held.version, held.newest_revert) == (5, 5)
    assert StateDigest.of(held.state).hex == bench.history().versions[2].state_digest
    reader = PackedBatchReader(
        bench.log, bench.store, model="policy", lineage=LINEAGE, ranks=2, clock=bench.clock
    )
    reader.start(held.version, held.offsets[0], held.plan_digest, held.newest_revert)
    plan = reader.read(0)
    assert plan is not None
    assert (plan.step, plan.batch.newest_revert) == (6, 5)
    reader.close()


def test_a_lineage_without_checkpoints_is_its_trainers_to_restore() -> None:
    history = trained(4, planned=4).history()
    bare = [msgspec.structs.replace(version, checkpoint=None) for version in history.versions]
    check_restorable(order_history(bare, history.steps), 3, dict.fromkeys(PARTITIONS, 99))
