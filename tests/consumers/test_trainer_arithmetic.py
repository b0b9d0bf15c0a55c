"""The trainer of integers: what its weights depend on, what its events say, and when its ranks agree."""

from __future__ import annotations

import threading
from functools import cache

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.consumers.trainer.arithmetic import ArithmeticLearner, run_arithmetic_trainer
from rollwire.consumers.trainer.checkpoint_store import Part, read_checkpoint
from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.trainer.history import read_history
from rollwire.consumers.trainer.rehearsal import TOPICS, Rehearsal, plan, rehearsal_log, sequences
from rollwire.consumers.trainer.sums import NOTHING, Sums, fold, hashes, state_of, sums_of
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.policy.config import PolicyConfig
from rollwire.schemas.errors import DeadlineExceeded, OffsetLost, StateMismatch
from rollwire.schemas.records import Microbatch, PackedBatch, Position, WeightVersion
from rollwire.schemas.release import code_version
from rollwire.schemas.validate import validate
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.clock import ManualClock, SystemClock
from rollwire.streams.seams.log import Outgoing
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store_memory import MemoryStore

LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"
SPEC = Rehearsal(PolicyConfig(num_hidden_layers=1, num_experts=2), LINEAGE, sequences=8, microbatches=1)
CONFIG = TrainerConfig(checkpoint_every=2)


@cache
def slices(step: int = 1, spec: Rehearsal = SPEC) -> tuple[PackedBatch, ...]:
    stands = [Position(topic="routing-traces", partition=0, offset=i) for i in range(spec.sequences)]
    return tuple(plan(spec, step, stands))


@cache
def single() -> tuple[PackedBatch, ...]:
    """The first step's sequences, each alone in a plan."""
    (whole,) = slices(spec=SPEC._replace(microbatches=SPEC.sequences))
    return tuple(msgspec.structs.replace(whole, microbatches=(micro,)) for micro in whole.microbatches)


def digest(sums: Sums) -> str:
    return StateDigest.of(state_of(sums)).hex


def train(log: MemoryLog, store: MemoryStore, config: TrainerConfig, until_step: int) -> WeightVersion | None:
    return run_arithmetic_trainer(
        log,
        store,
        config,
        prefix="t.",
        model="policy",
        lineage=LINEAGE,
        stop=threading.Event(),
        until_step=until_step,
    )


def trained(order: list[int]) -> Sums:
    micros = tuple(single()[index].microbatches[0] for index in order)
    return fold(NOTHING, [msgspec.structs.replace(single()[0], microbatches=micros)])


@settings(deadline=None)
@given(
    one=st.lists(st.integers(0, SPEC.sequences - 1), max_size=8),
    other=st.lists(st.integers(0, SPEC.sequences - 1), max_size=8),
)
def test_weights_are_equal_for_the_same_rollouts_in_the_same_order_alone(
    one: list[int], other: list[int]
) -> None:
    assert (digest(trained(one)) == digest(trained(other))) is (one == other)
    assert trained(one).trained == len(one)
    assert sums_of(state_of(trained(one))) == trained(one)


@pytest.mark.parametrize("field", ["token_ids", "loss_mask", "logprobs", "versions", "advantages"])
def test_every_array_of_a_rollout_is_in_its_hash(field: str) -> None:
    micro = slices()[0].microbatches[0]
    data = bytearray(getattr(micro, field))
    data[-1] ^= 1
    changed = hashes(msgspec.structs.replace(micro, **{field: bytes(data)}))
    assert changed[:-1] == hashes(micro)[:-1]
    assert changed[-1] != hashes(micro)[-1]


def test_a_hash_is_of_the_rollout_and_not_of_its_place() -> None:
    together = hashes(slices()[0].microbatches[0])
    alone = [hashes(one.microbatches[0])[0] for one in single()]
    assert together == alone
    assert len(set(alone)) == SPEC.sequences
    assert [one.rollout_id for one in sequences(SPEC, 1)] == list(slices()[0].microbatches[0].rollout_ids)


def test_a_microbatch_without_sequences_changes_nothing() -> None:
    nothing = Microbatch(
        rollout_ids=(), cu_seqlens=b"\0" * 4, token_ids=b"", loss_mask=b"", logprobs=b"", versions=b"", advantages=b"",
        traces=(),
    )  # fmt: skip
    assert hashes(nothing) == []


def test_steps_are_complete_events_of_a_model_that_predicts_nothing() -> None:
    log, store = rehearsal_log(SPEC, 3), MemoryStore()
    last = train(log, store, CONFIG, 3)
    assert last is not None
    history = read_history(log, "policy", LINEAGE, deadline_s=5, clock=SystemClock())
    sums = NOTHING
    for step in history.steps:
        validate(step)
        sums = fold(sums, slices(step.step))
        assert step.state_digest == digest(sums)
        assert (step.loss, step.grad_norm, step.entropy, step.learning_rate) == (0.0,) * 4
        assert (step.mismatch.max, step.mismatch.k3) == (0.0, 0.0)
        assert step.mismatch.tokens == step.trained_tokens > 0
        assert step.sequences == SPEC.sequences
        assert step.settings == {"learner": "arithmetic", "ranks": "1", "code": code_version()}
        assert {row.fleet for row in step.mismatch_by} == {"fleet-0", "fleet-1"}
    assert last.state_digest == digest(sums)
    claim = history.versions[2].checkpoint
    assert claim is not None
    with pytest.raises(StateMismatch, match="other parameters"):
        read_checkpoint(store, claim, lineage=LINEAGE, parameters=(Part(name="embed", shape=(2,)),))
    learner = ArithmeticLearner(log, store, CONFIG, model="policy", lineage=LINEAGE, clock=SystemClock())
    assert learner.restore(claim) == (2,)
    assert digest(learner.sums) == history.versions[2].state_digest
    learner.close()


def test_ranks_whose_slices_become_visible_one_after_the_other() -> None:
    """A transaction's end reaches one partition before another."""
    spec = SPEC._replace(ranks=2, microbatches=2)
    clock, log = ManualClock(), MemoryLog(TOPICS)
    config = CONFIG.model_copy(update={"ranks": 2})
    learner = ArithmeticLearner(log, MemoryStore(), config, model="policy", lineage=LINEAGE, clock=clock)
    learner.begin()
    learner.start(0, (0, 0), None)
    writer = log.writer()
    first, second = (outgoing(one, source="test", time_us=clock.now_us()) for one in slices(1, spec))
    assert learner.read(0.0) is None
    writer.write([first])
    assert learner.read(0.0) is None
    clock.advance(config.read_deadline_s + 1)
    with pytest.raises(DeadlineExceeded, match="rank 1 got no plan of step 1"):
        learner.read(0.0)
    writer.write([second])
    heads = learner.read(0.0)
    assert heads is not None
    assert [head.end for head in heads] == [1, 1]
    learner.compute()
    learner.apply()
    assert learner.plan is None
    assert learner.sums == fold(NOTHING, slices(1, spec))
    learner.close()


def test_what_does_not_decode_beside_versions_and_steps_stops_no_trainer() -> None:
    log, store = rehearsal_log(SPEC, 2), MemoryStore()
    for _ in range(2):
        log.writer().write(
            [
                Outgoing(t, b"policy", value)
                for t in ("weight-versions", "train-steps")
                for value in (b"x", None)
            ]
        )
        last = train(log, store, CONFIG, 2)
        assert last is not None
        assert last.version == 2


class Shared(MemoryLog):
    """The trainer of another model has a transaction open; it ends when somebody waits for it."""

    def __init__(self) -> None:
        super().__init__(TOPICS)
        self._other = self.take_over("another", 1.0)
        self._other.begin()
        self._other.write([Outgoing(t, b"another", b"x") for t in ("weight-versions", "train-steps")])

    def wait(self, seconds: float) -> None:
        if self._other.transaction is not None:
            self._other.abort()


def test_versions_behind_the_transaction_of_another_trainer_are_not_missed() -> None:
    log, shared = rehearsal_log(SPEC, 2), Shared()
    train(log, MemoryStore(), CONFIG, 2)
    events = list(scan(log, ["train-steps", "weight-versions"]))
    shared.writer().write([Outgoing(r.topic, r.key, r.value, r.headers) for r in events])
    history = read_history(shared, "policy", LINEAGE, deadline_s=5, clock=SystemClock())
    assert [version.version for version in history.versions] == [0, 1, 2]


def test_a_changed_number_of_ranks_halts() -> None:
    log, store = rehearsal_log(SPEC, 2), MemoryStore()
    train(log, store, CONFIG, 1)
    with pytest.raises(OffsetLost, match="has no offset for"):
        train(log, store, CONFIG.model_copy(update={"ranks": 2}), 2)
