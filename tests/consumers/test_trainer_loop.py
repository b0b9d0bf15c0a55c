"""The trainer whole, on the in-memory log and store: exactly once, over every crash between a step and its commit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import pytest

from rollwire.consumers.trainer.checkpoint import load_checkpoint, parameter_layout
from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.trainer.history import History, read_history
from rollwire.consumers.trainer.rank import RankWorker
from rollwire.consumers.trainer.rehearsal import TINY as POLICY
from rollwire.consumers.trainer.rehearsal import TOPICS, Rehearsal, connect_rehearsal, write_plans
from rollwire.consumers.trainer.run import run_trainer
from rollwire.consumers.weights.paths import plan_path
from rollwire.consumers.weights.reader import load_version
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.policy.model import Policy
from rollwire.kernels.policy.states import to_state
from rollwire.kernels.tensors import State
from rollwire.schemas.errors import (
    ConfigError,
    Fenced,
    OffsetLost,
    PlanViolation,
    RankLost,
    ReplayDiverged,
    RollwireError,
    StoreUnavailable,
    TransactionUnknown,
)
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.forwarding import ForwardingTransactions
from rollwire.streams.seams.log import Outgoing, TopicPartition, TransactionalWriter
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.store import ObjectStore
from rollwire.streams.seams.store_memory import MemoryStore

pytestmark = pytest.mark.torch

LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"
SPEC = Rehearsal(POLICY, LINEAGE)
CONFIG = TrainerConfig(checkpoint_every=2, no_replay_every=2)
STEPS = 5


class Crash(Exception):
    """Something that no code of ours expects."""


class CrashingStore(MemoryStore):
    """Dies at one of its writes, before or after the object stands; what it holds survives."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0
        self.die_at = -1
        self.after = False
        self.error: Callable[[], Exception] = Crash

    def create(self, key: str, data: bytes) -> bool:
        self.writes += 1
        dies = self.writes == self.die_at
        if dies and not self.after:
            raise self.error()
        created = super().create(key, data)
        if dies:
            raise self.error()
        return created


class _CrashingWriter(ForwardingTransactions):
    def __init__(self, inner: TransactionalWriter, log: CrashingLog) -> None:
        super().__init__(inner)
        self._log = log

    def write(self, records: Sequence[Outgoing]) -> None:
        self._log.strike("before write")
        self._inner.write(records)

    def commit(
        self,
        group: str,
        offsets: Mapping[TopicPartition, int],
        timeout_s: float = 30.0,
        *,
        also: Mapping[str, Mapping[TopicPartition, int]] | None = None,
    ) -> None:
        self._log.strike("before commit")
        self._inner.commit(group, offsets, timeout_s, also=also)
        self._log.strike("after commit")


class CrashingLog(MemoryLog):
    """Dies once, at the `countdown`th time that `place` is reached."""

    place = ""
    countdown = 0
    error: Callable[[], Exception] = Crash

    def strike(self, place: str) -> None:
        if place == self.place:
            self.countdown -= 1
            if self.countdown == 0:
                raise self.error()

    def transactional_writer(self, transactional_id: str, timeout_s: float = 60.0) -> TransactionalWriter:
        return _CrashingWriter(super().transactional_writer(transactional_id, timeout_s), self)


class Outcome(NamedTuple):
    log: MemoryLog
    store: ObjectStore

    def history(self) -> History:
        return read_history(self.log, "policy", LINEAGE, deadline_s=5, clock=SystemClock())

    def digests(self) -> list[str]:
        return [version.state_digest for version in self.history().versions]

    def raw(self, topic: str) -> int:
        """Records on a topic, repeats included."""
        reader = self.log.reader()
        partition = TopicPartition(topic, 0)
        reader.assign({partition: 0})
        end = self.log.end_offsets([partition])[partition]
        count = 0
        while reader.positions()[partition] < end:
            count += len(reader.poll(100, 1.0))
        reader.close()
        return count


def initial() -> State:
    return to_state(Policy(POLICY, seed=3), "F32")


def fresh(log: MemoryLog | None = None, store: ObjectStore | None = None, spec: Rehearsal = SPEC) -> Outcome:
    made = MemoryLog(TOPICS) if log is None else log
    write_plans(made, spec, range(1, STEPS + 1))
    return Outcome(made, MemoryStore() if store is None else store)


def train(
    outcome: Outcome, until_step: int = STEPS, config: TrainerConfig = CONFIG, spec: Rehearsal = SPEC
) -> None:
    run_trainer(
        outcome.log,
        outcome.store,
        spec.policy_config,
        config,
        prefix="t.",
        model="policy",
        lineage=LINEAGE,
        initial=initial(),
        stop=threading.Event(),
        until_step=until_step,
        connect=partial(connect_rehearsal, spec, STEPS) if config.ranks > 1 else None,
    )


@cache
def reference() -> tuple[str, ...]:
    """The digests of an undisturbed run."""
    outcome = fresh()
    train(outcome)
    return tuple(outcome.digests())


def check_exactly_once(outcome: Outcome) -> None:
    history = outcome.history()  # refuses holes and gaps itself
    assert tuple(outcome.digests()) == reference()
    assert outcome.raw("weight-versions") == STEPS + 1
    assert outcome.raw("train-steps") == STEPS
    partition = TopicPartition("packed-batches", 0)
    assert outcome.log.committed("t.trainer", [partition]) == {partition: history.steps[-1].consumed[0].end}


def test_a_step_per_plan_a_version_per_step_in_one_transaction() -> None:
    outcome = fresh()
    train(outcome)
    check_exactly_once(outcome)
    history = outcome.history()
    assert len(set(outcome.digests())) == STEPS + 1
    assert [v.checkpoint is not None for v in history.versions] == [True, False, True, False, True, False]
    path = plan_path(history.versions, (), None, STEPS)
    assert StateDigest.of(load_version(outcome.store, path, None)).hex == history.versions[-1].state_digest
    first, second = history.steps[:2]
    assert (first.base_version, first.version, first.max_lag) == (0, 1, 0)
    assert [(c.lag, c.tokens > 0) for c in second.lag_histogram] == [(0, True), (1, True)]
    assert first.mismatch_no_replay is None
    assert second.mismatch_no_replay is not None
    assert second.mismatch_no_replay != second.mismatch
    assert second.routes_differing is not None
    assert 0 < second.routes_differing <= 1  # recorded routes are random, so a free router differs
    assert first.mismatch.tokens == first.trained_tokens > 0
    assert first.grad_norm > 0
    assert first.entropy > 0
    assert first.settings["forward"] == "published"


def test_trained_masters_round_to_the_published_bits() -> None:
    outcome = fresh()
    train(outcome, 4)
    version = outcome.history().versions[4]
    assert version.checkpoint is not None
    checkpoint, snapshot = load_checkpoint(
        outcome.store, version.checkpoint, lineage=LINEAGE, parameters=parameter_layout(POLICY)
    )
    assert (checkpoint.step, checkpoint.updates, checkpoint.state_digest) == (4, 4, version.state_digest)
    assert snapshot.masters_N.shape == (sum(p.numel() for p in Policy(POLICY).parameters()),)


def test_a_restart_replays_from_the_checkpoint_and_goes_on() -> None:
    outcome = fresh()
    for until_step in (1, 3, 3, STEPS):
        train(outcome, until_step)
        assert len(outcome.history().steps) == until_step
    check_exactly_once(outcome)


def test_a_crash_at_every_write_to_the_store_leaves_no_hole_and_no_repeat() -> None:
    dry = CrashingStore()
    train(fresh(store=dry))
    assert dry.writes > 20
    for die_at in range(1, dry.writes + 1):
        store = CrashingStore()
        store.die_at, store.after = die_at, die_at % 2 == 0
        outcome = fresh(store=store)
        with pytest.raises(RollwireError, match="Crash"):
            train(outcome)
        train(outcome)
        check_exactly_once(outcome)


@pytest.mark.parametrize("place", ["before write", "before commit", "after commit"])
@pytest.mark.parametrize("countdown", [1, 2, 4])
def test_a_crash_around_the_transaction_leaves_no_hole_and_no_repeat(place: str, countdown: int) -> None:
    log = CrashingLog(TOPICS)
    outcome = fresh(log=log)
    log.place, log.countdown = place, countdown
    with pytest.raises(RollwireError, match="Crash"):
        train(outcome)
    train(outcome)
    check_exactly_once(outcome)


@pytest.mark.parametrize("place", ["before write", "before commit", "after commit"])
@pytest.mark.parametrize("countdown", [1, 3])
def test_an_unknown_outcome_is_learnt_from_the_log(place: str, countdown: int) -> None:
    log = CrashingLog(TOPICS)
    outcome = fresh(log=log)
    log.place, log.countdown, log.error = place, countdown, partial(TransactionUnknown, "timed out")
    train(outcome)  # no restart of the trainer is needed
    check_exactly_once(outcome)


@pytest.mark.parametrize("after", [False, True])
def test_a_store_that_is_away_discards_and_restarts_within_the_process(after: bool) -> None:
    store = CrashingStore()
    store.die_at, store.after, store.error = 14, after, partial(StoreUnavailable, "away")
    outcome = fresh(store=store)
    train(outcome)
    assert store.writes > store.die_at
    check_exactly_once(outcome)


def test_a_store_that_stays_away_ends_the_trainer_with_its_reason() -> None:
    class Away(MemoryStore):
        def create(self, key: str, data: bytes) -> bool:
            raise StoreUnavailable("away for good")

    outcome = fresh(store=Away())
    with pytest.raises(StoreUnavailable, match="for good"):
        train(outcome, config=CONFIG.model_copy(update={"max_restarts": 0}))
    assert outcome.raw("weight-versions") == 0


def test_other_bits_in_a_replay_halt_and_name_the_changed_setting() -> None:
    outcome = fresh()
    train(outcome, 3)
    with pytest.raises(ReplayDiverged, match=r"learning_rate: 0\.0002 -> 0\.01"):
        train(outcome, config=CONFIG.model_copy(update={"learning_rate": 0.01}))
    assert outcome.raw("weight-versions") == 4


def test_lost_offsets_never_retrain() -> None:
    outcome = fresh()
    train(outcome, 3)
    partition = TopicPartition("packed-batches", 0)
    outcome.log.set_committed("t.trainer", partition, 0)
    with pytest.raises(OffsetLost, match="ended at"):
        train(outcome)
    outcome.log.set_committed("t.trainer", partition, 3)
    outcome.log.trim(partition, 3)
    with pytest.raises(OffsetLost, match="retention"):
        train(outcome)
    assert outcome.raw("train-steps") == 3


def test_a_second_trainer_fences_the_first() -> None:
    class Taking(CrashingLog):
        def strike(self, place: str) -> None:
            if place == "before commit":
                self.countdown -= 1
                if self.countdown == 0:
                    MemoryLog.transactional_writer(self, "t.trainer")

    log = Taking(TOPICS)
    outcome = fresh(log=log)
    log.countdown = 3
    with pytest.raises(Fenced):
        train(outcome)
    assert len(outcome.history().steps) == 1
    train(outcome)
    check_exactly_once(outcome)


def test_a_plan_out_of_order_halts_and_commits_nothing_of_it() -> None:
    log = MemoryLog(TOPICS)
    write_plans(log, SPEC, range(1, 2))
    write_plans(log, SPEC, range(3, 4))
    outcome = Outcome(log, MemoryStore())
    with pytest.raises(PlanViolation, match="step is 3"):
        train(outcome)
    assert len(outcome.history().versions) <= 2


def test_repeated_plans_are_dropped_and_an_older_lineage_is_passed_by() -> None:
    log = MemoryLog(TOPICS)
    write_plans(log, SPEC._replace(lineage="0197a1b2-0000-7000-8000-0000000000bb", seed=9), range(1, 3))
    write_plans(log, SPEC, range(1, 2))
    partition = TopicPartition("packed-batches", 0)
    reader = log.reader()
    reader.assign({partition: 2})
    again = reader.poll(1, 1.0)[0]
    log.writer().write([Outgoing(again.topic, again.key, again.value, again.headers, 0)])
    write_plans(log, SPEC, range(2, STEPS + 1))
    outcome = Outcome(log, MemoryStore())
    train(outcome, 3)
    train(outcome)
    # Traces stand elsewhere than in the reference, the sequences are the same: so are the bits.
    check_exactly_once(outcome)


def test_a_read_goes_on_behind_a_poll_that_brought_nothing() -> None:
    """As at the end of a transaction: the plan is in the log, so a rank that is told to read it has to find it."""
    log = MemoryLog(TOPICS)
    write_plans(log, SPEC._replace(lineage=LINEAGE[:-2] + "bb"), range(1, 20))  # more than one poll takes
    write_plans(log, SPEC, range(1, 2))
    worker = RankWorker(
        log, MemoryStore(), POLICY, CONFIG, model="policy", lineage=LINEAGE, rank=0, clock=SystemClock(),
        all_reduce=lambda vector: None,
    )  # fmt: skip
    worker.start(0, 0, None)
    head = worker.read(10.0)
    assert head is not None
    assert head.end == 20
    assert worker.read(0.05) is None
    worker.close()


def test_without_versions_and_initial_weights_there_is_nothing_to_train() -> None:
    outcome = fresh()
    with pytest.raises(ConfigError, match="initial"):
        run_trainer(
            outcome.log, outcome.store, POLICY, CONFIG, prefix="t.", model="policy", lineage=LINEAGE, initial=None,
            stop=threading.Event(),
        )  # fmt: skip


def test_stop_finishes_the_running_step_and_leaves_nothing_half_done() -> None:
    outcome = fresh()
    stop = threading.Event()
    run = threading.Thread(
        target=run_trainer,
        args=(outcome.log, outcome.store, POLICY, CONFIG),
        kwargs={"prefix": "t.", "model": "policy", "lineage": LINEAGE, "initial": initial(), "stop": stop},
    )
    run.start()
    reader = outcome.log.reader()
    reader.assign({TopicPartition("weight-versions", 0): 0})
    assert reader.poll(1, 20.0)
    stop.set()
    run.join(timeout=10.0)
    assert not run.is_alive()
    train(outcome)
    check_exactly_once(outcome)


@pytest.mark.parametrize(
    "change", [{"control": True}, {"routing_replay": False}, {"forward": "masters"}, {"routing_filter": True}]
)
def test_switches_change_the_bits(change: dict[str, object]) -> None:
    outcome = fresh()
    train(outcome, 2, CONFIG.model_copy(update=change))
    assert outcome.digests()[0] == reference()[0]
    assert outcome.digests()[2] != reference()[2]
    settings = outcome.history().steps[0].settings
    assert all(settings[name] == str(value) for name, value in change.items())


@pytest.mark.parametrize("replay", [True, False])
def test_the_filter_counts_implausible_experts_by_layer(replay: bool) -> None:
    """Recorded experts of a rehearsal are random, so the router finds many of them implausible."""
    outcome, plain = fresh(), fresh()
    filtering = {"routing_filter": True, "routing_plausible": 1.0}
    train(outcome, 1, CONFIG.model_copy(update=filtering | {"routing_replay": replay}))
    train(plain, 1, CONFIG.model_copy(update={"routing_replay": replay}))
    step, without = outcome.history().steps[0], plain.history().steps[0]
    assert len(step.routes_implausible) == POLICY.num_hidden_layers
    assert all(count > 0 for count in step.routes_implausible)
    assert without.routes_implausible == ()
    assert (step.state_digest == without.state_digest) is not replay


def test_how_a_step_is_cut_into_microbatches_does_not_matter() -> None:
    """Which it would if a token saw another sequence."""
    norms = []
    for microbatches in (1, 16):
        outcome = fresh(spec=SPEC._replace(microbatches=microbatches))
        train(outcome, 1)
        step = outcome.history().steps[0]
        norms.append((step.grad_norm, step.loss, step.entropy))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_rank_that_dies_is_named_at_once() -> None:
    spec = SPEC._replace(ranks=2)
    outcome = fresh(spec=spec)
    with pytest.raises(RankLost, match="rank 1"):
        run_trainer(
            outcome.log, outcome.store, POLICY, CONFIG.model_copy(update={"ranks": 2}), prefix="t.", model="policy",
            lineage=LINEAGE, initial=initial(), stop=threading.Event(), connect=partial(connect_rehearsal, spec, "x"),  # type: ignore[arg-type]
        )  # fmt: skip


def test_two_ranks_equal_one() -> None:
    masters: list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = []
    steps = []
    for ranks in (1, 2):
        spec = SPEC._replace(ranks=ranks)
        config = CONFIG.model_copy(update={"ranks": ranks, "rank_deadline_s": 60.0})
        outcome = fresh(spec=spec)
        train(outcome, 4, config, spec)
        history = outcome.history()
        claim = history.versions[4].checkpoint
        assert claim is not None
        _, snapshot = load_checkpoint(
            outcome.store, claim, lineage=LINEAGE, parameters=parameter_layout(POLICY)
        )
        masters.append(snapshot.masters_N.numpy())
        steps.append(history.steps)
    np.testing.assert_allclose(masters[1], masters[0], rtol=1e-5, atol=1e-9)
    for one, two in zip(*steps, strict=True):
        assert (two.loss, two.grad_norm) == pytest.approx((one.loss, one.grad_norm), rel=1e-5)
        assert (two.tokens, two.trained_tokens) == (one.tokens, one.trained_tokens)
        assert [r.partition for r in two.consumed] == [0, 1]
