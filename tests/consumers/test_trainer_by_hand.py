"""The arithmetic trainer in one thread, by hand: a death between any two effects, a restart, the same digests.

This is how a simulation drives it: `Session.turn` and `Inline.turn` in any order, every call of the log and the store an
effect at which the process may die, on a clock that moves when it is told to.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import msgspec
import numpy as np
import pytest

from rollwire.consumers.trainer.arithmetic import ArithmeticLearner, arithmetic_run
from rollwire.consumers.trainer.books import Books, Entry, start
from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.trainer.figures import Figures
from rollwire.consumers.trainer.history import History, read_history
from rollwire.consumers.trainer.pipeline import Run
from rollwire.consumers.trainer.rehearsal import TOPICS, Rehearsal, write_plans
from rollwire.consumers.trainer.session import Session
from rollwire.consumers.trainer.sums import NOTHING, fold, state_of, sums_of
from rollwire.consumers.weights.paths import plan_path
from rollwire.consumers.weights.publisher import PublisherConfig
from rollwire.consumers.weights.reader import load_version
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.policy.config import PolicyConfig
from rollwire.schemas.errors import (
    DeadlineExceeded,
    OffsetLost,
    PlanViolation,
    StoreUnavailable,
    TransactionUnknown,
    WeightError,
)
from rollwire.schemas.records import PackedBatch
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.forwarding import ForwardingLog, ForwardingReader, ForwardingTransactions, Offsets
from rollwire.streams.seams.log import Outgoing, Reader, Record, TopicPartition, TransactionalWriter
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store_memory import MemoryStore
from rollwire.streams.seams.work import Inline

LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"
POLICY = PolicyConfig(num_hidden_layers=1, num_experts=2)
STEPS = 6
CONFIG = TrainerConfig(checkpoint_every=2, ranks=2)
SPEC = Rehearsal(POLICY, LINEAGE, ranks=2, sequences=8)


class Died(BaseException):
    """The process is gone. No `Exception`: nothing may catch it."""


class World:
    """What survives a process: the log, the store, the clock. `effect` is called before each of their calls, and after
    each that changes them."""

    def __init__(self, spec: Rehearsal = SPEC) -> None:
        self.clock = ManualClock()
        self.log = _Log(self)
        self.store = _Store(self)
        self.stop = threading.Event()
        self.effects = 0
        self.die_at = -1
        self.error: Callable[[], BaseException] = Died
        self.unanswered = 0  # commits whose answer never comes: the client waits as long as it is told to
        write_plans(self.log.inner, spec, range(1, STEPS + 1))

    def effect(self) -> None:
        self.effects += 1
        if self.effects == self.die_at:
            raise self.error()

    def run(self, work: Inline, config: TrainerConfig = CONFIG) -> Run:
        return arithmetic_run(
            self.log,
            self.store,
            config,
            prefix="t.",
            model="policy",
            lineage=LINEAGE,
            stop=self.stop,
            until_step=STEPS,
            clock=self.clock,
            publisher_config=PublisherConfig(anchor_every=3),
            work=work,
        )

    def session(self, work: Inline, config: TrainerConfig = CONFIG) -> Session:
        return Session(self.run(work, config))

    def history(self) -> History:
        return read_history(self.log.inner, "policy", LINEAGE, deadline_s=5, clock=self.clock)

    def keys(self) -> set[str]:
        return {found.key for found in self.store.list("")}

    def digests(self) -> list[str]:
        return [version.state_digest for version in self.history().versions]


class _Log(ForwardingLog):
    """A `MemoryLog` whose calls are effects."""

    def __init__(self, world: World) -> None:
        self.inner = MemoryLog(TOPICS, world.clock)
        super().__init__(self.inner)
        self._world = world

    def _ask(self, question: str, ask: Callable[[], Offsets]) -> Offsets:
        self._world.effect()
        return ask()

    def reader(self) -> Reader:
        return _Reader(super().reader(), self._world)

    def transactional_writer(self, transactional_id: str, timeout_s: float = 60.0) -> TransactionalWriter:
        self._world.effect()
        return _Writer(super().transactional_writer(transactional_id, timeout_s), self._world)


class _Reader(ForwardingReader):
    def __init__(self, inner: Reader, world: World) -> None:
        super().__init__(inner)
        self._world = world

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        self._world.effect()
        return super().poll(max_records, timeout_s)


class _Writer(ForwardingTransactions):
    def __init__(self, inner: TransactionalWriter, world: World) -> None:
        super().__init__(inner)
        self._world = world

    def begin(self) -> None:
        self._world.effect()
        super().begin()

    def write(self, records: Sequence[Outgoing]) -> None:
        self._world.effect()
        super().write(records)

    def commit(
        self,
        group: str,
        offsets: Mapping[TopicPartition, int],
        timeout_s: float = 30.0,
        *,
        also: Mapping[str, Mapping[TopicPartition, int]] | None = None,
    ) -> None:
        self._world.effect()
        if self._world.unanswered:
            self._world.unanswered -= 1
            self._world.clock.advance(timeout_s)
            raise TransactionUnknown("no answer")
        super().commit(group, offsets, timeout_s, also=also)
        self._world.effect()


class _Store(MemoryStore):
    def __init__(self, world: World) -> None:
        super().__init__(world.clock)
        self._world = world

    def create(self, key: str, data: bytes) -> bool:
        self._world.effect()
        created = super().create(key, data)
        self._world.effect()
        return created


def live(world: World, choose: random.Random, config: TrainerConfig = CONFIG) -> Session:
    """One life to its end; `choose` says who goes on."""
    work = Inline()
    session = world.session(work, config)
    while True:
        if choose.random() < 0.5 and work.turn(choose.choice(work.ready() or [""])):
            continue
        turned = session.turn()
        if turned == "done":
            session.close()
            return session
        if turned == "waiting" and not work.ready():
            left_s = work.next_s()
            world.clock.advance(0.05 if left_s is None else left_s)


def expected(world: World) -> list[str]:
    """Digests of the versions, from the plans alone."""
    slices: dict[int, list[PackedBatch]] = {}
    for record in scan(world.log.inner, ("packed-batches",)):
        event = decode_record(record)
        assert isinstance(event, PackedBatch)
        slices.setdefault(event.step, []).append(event)
    sums, digests = NOTHING, [StateDigest.of(state_of(NOTHING)).hex]
    for step in sorted(slices):
        sums = fold(sums, sorted(slices[step], key=lambda one: one.rank))
        digests.append(StateDigest.of(state_of(sums)).hex)
    return digests


@cache
def undisturbed() -> frozenset[str]:
    """Keys of the objects that a life without a death leaves."""
    world = World()
    live(world, random.Random(0))
    return frozenset(world.keys())


def check(world: World) -> None:
    """Each plan once, in order, as the log and the bytes in the store tell. What a life made that died is made again under
    the same keys: no checkpoint, anchor or delta stands twice."""
    assert world.keys() == undisturbed()
    history = world.history()  # refuses holes and ranges that do not join
    assert world.digests() == expected(world)
    state = load_version(world.store, plan_path(history.versions, (), None, STEPS), None)
    assert sums_of(state).trained == STEPS * SPEC.sequences
    partitions = [TopicPartition("packed-batches", rank) for rank in range(2)]
    ends = {TopicPartition(r.topic, r.partition): r.end for r in history.steps[-1].consumed}
    assert world.log.committed("t.trainer", partitions) == ends
    for topic, count in (("weight-versions", STEPS + 1), ("train-steps", STEPS)):
        assert len(list(scan(world.log.inner, (topic,)))) == count


def test_an_undisturbed_life_trains_each_plan_once() -> None:
    world = World()
    session = live(world, random.Random(0))
    assert session.result is not None
    assert session.result.version == STEPS
    check(world)
    assert [v.checkpoint is not None for v in world.history().versions] == [True, False] * 3 + [True]


def test_an_answer_that_never_comes_costs_one_attempt_and_not_the_whole_deadline() -> None:
    """A broker takes the answers it owes with it when it dies; the trainer is not to stand still for a minute then."""
    world = World()
    world.unanswered = 2
    began_s = world.clock.monotonic_s()
    session = live(world, random.Random(0))
    assert session.result is not None
    assert world.clock.monotonic_s() - began_s < CONFIG.commit_deadline_s / 2
    check(world)


def test_a_death_between_any_two_effects_leaves_no_hole_and_no_repeat() -> None:
    dry = World()
    live(dry, random.Random(1))
    assert dry.effects > 80
    for die_at in range(1, dry.effects + 1):
        world = World()
        world.die_at = die_at
        with pytest.raises(Died):
            live(world, random.Random(1))
        live(world, random.Random(die_at))
        check(world)


class Hasty(Books):
    """A planted bug: step n + 1 is committed before n."""

    @property
    def first(self) -> Entry | None:
        return self.open[-1] if self.open else None

    def commit(self, version: int) -> Books:
        if version == self.open[0].version:
            return super().commit(version)
        return self._replace(open=tuple(entry for entry in self.open if entry.version != version))


def hurry(session: Session, work: Inline) -> None:
    """The trainer is as far ahead of its background as it may be."""
    while (turned := session.turn()) != "done":
        if turned == "waiting":
            work.turn()


def test_a_commit_out_of_order_would_be_seen() -> None:
    world, work = World(), Inline()
    session = Session(world.run(work)._replace(books=Hasty(*start())))
    with pytest.raises(WeightError, match="not the next one to commit"):
        hurry(session, work)
    with pytest.raises(PlanViolation, match="hole"):
        world.history()


@pytest.mark.parametrize("seed", range(20))
def test_deaths_and_lost_answers_one_after_another(seed: int) -> None:
    world, choose = World(), random.Random(seed)
    for _ in range(12):
        world.die_at = world.effects + choose.randrange(1, 60)
        world.error = partial(choose.choice([Died, TransactionUnknown, StoreUnavailable]), "here")
        try:
            live(world, choose)
        except (Died, TransactionUnknown, StoreUnavailable):
            continue
    world.die_at = -1
    live(world, choose)
    check(world)


def test_two_steps_are_uncommitted_and_no_more_while_nothing_is_committed() -> None:
    world, work = World(), Inline()
    session = world.session(work)
    while session.turn() == "moved" or work.turn():  # the background goes on only while the trainer waits
        if len(world.history().versions) == 1:
            break
    turns = [session.turn() for _ in range(10)]
    assert turns.count("moved") == 3  # to begin, and two steps
    assert turns[-1] == "waiting"
    assert len(world.history().versions) == 1
    assert work.ready()


def test_a_version_that_never_reaches_the_store_ends_at_its_deadline() -> None:
    world, work = World(), Inline()
    session = world.session(work)
    session.turn()
    while work.turn("trainer-commit"):
        pass
    world.clock.advance(CONFIG.publish_deadline_s)
    assert work.turn("trainer-commit")
    with pytest.raises(DeadlineExceeded, match="version 0 did not reach"):
        session.turn()


class Drifting(ArithmeticLearner):
    """Finds every token a little less likely than its sampler did. As a factory: makes itself."""

    def __init__(self, world: World, config: TrainerConfig) -> None:
        super().__init__(world.log, world.store, config, model="policy", lineage=LINEAGE, clock=world.clock)

    def __call__(self) -> ArithmeticLearner:
        return self

    def compute(self) -> list[Figures]:
        return [
            msgspec.structs.replace(one, pi=(np.frombuffer(one.mu, "<f4") - np.float32(0.1)).tobytes())
            for one in super().compute()
        ]


def taken_and_left(world: World, work: Inline) -> Session:
    """A session with two steps that nobody commits."""
    session = world.session(work)
    while len(world.history().versions) == 0:
        assert session.turn() != "done"
        work.turn()
    while session.turn() == "moved":
        pass
    return session


def test_told_to_stop_it_waits_for_its_share_and_leaves_the_rest_to_the_next_life() -> None:
    world, work = World(), Inline()
    session = taken_and_left(world, work)
    world.stop.set()
    assert [session.turn() for _ in range(3)] == ["moved", "waiting", "waiting"]
    world.clock.advance(CONFIG.shutdown_s)
    assert session.turn() == "done"
    assert session.result is not None
    assert session.result.version == 0
    session.close()
    assert not work.turn()
    world.stop.clear()
    live(world, random.Random(4))
    check(world)


def test_done_or_paused_it_does_not_end_well_with_a_step_uncommitted() -> None:
    """A version that was taken for the last one, or that raised the alarm, must be in the log when the trainer says so."""
    paused = CONFIG.model_copy(
        update={
            "mismatch_bound": 1e-9,
            "mismatch_steps": 1,
            "mismatch_action": "pause",
            "mismatch_min_tokens": 1,
        }
    )
    for config, until_step in ((CONFIG, 2), (paused, None)):
        world, work = World(), Inline()
        session = Session(
            world.run(work, config)._replace(until_step=until_step, learner=Drifting(world, config))
        )
        while len(world.history().versions) == 0:
            session.turn()
            work.turn()
        while session.turn() == "moved":
            pass
        world.clock.advance(config.publish_deadline_s + 2 * config.commit_deadline_s)
        with pytest.raises(DeadlineExceeded, match="taken and is not committed"):
            session.turn()
        assert len(world.history().versions) == 1


def test_offsets_that_somebody_moved_halt() -> None:
    world = World()
    live(world, random.Random(3))
    world.log.inner.set_committed("t.trainer", TopicPartition("packed-batches", 1), 0)
    with pytest.raises(OffsetLost, match="ended at"):
        live(world, random.Random(3))
