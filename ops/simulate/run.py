"""One seed, from its first event to the end of all checks."""

from __future__ import annotations

import logging
import random
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import Event
from typing import Final, NamedTuple

import structlog

from rollwire.consumers.trainer.arithmetic import arithmetic_run
from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.trainer.session import Session as TrainerSession
from rollwire.consumers.weights.publisher import PublisherConfig
from rollwire.consumers.weights.revert import Reverting, RevertRun
from rollwire.ops.simulate.actors import ENDED, Actor, Errand, Life, Make, Producers
from rollwire.ops.simulate.laws import PREFIX, Laws, Limits
from rollwire.ops.simulate.log import SimulatedLog
from rollwire.ops.simulate.points import TARGETS
from rollwire.ops.simulate.rest import check_rest, topics
from rollwire.ops.simulate.weights import check_weights
from rollwire.ops.simulate.workload import DEADLINE_S, LINEAGE, LIVE_DEADLINE_S, MODEL, Workload
from rollwire.ops.simulate.world import Point, Process, Violated, World
from rollwire.streams import synthetic
from rollwire.streams.assemble import Assembler
from rollwire.streams.assemble_config import LIVE, SAMPLED, AssembleConfig, JoinConfig, Kind, ProductionConfig
from rollwire.streams.pack import PackConfig
from rollwire.streams.pack_cohort import CohortConfig
from rollwire.streams.run_assemble import drive
from rollwire.streams.run_pack import drive as pack_drive
from rollwire.streams.runtime import RuntimeConfig, Session
from rollwire.streams.seams.log import Log, TopicPartition
from rollwire.streams.seams.store import ObjectStore
from rollwire.streams.seams.store_memory import MemoryStore
from rollwire.streams.seams.work import Inline

EFFECTS: Final = 320  # of a seed before it is healed, at least
_GROUPS: Final = 14
_ROUNDS: Final = 160  # until it must be at rest
_TURNS: Final = 2  # of each process in a round
_HORIZON_S: Final = 40.0
_RETENTION_S: Final = 2 * _HORIZON_S  # of marks in groups-closed, as the catalogue has it
RUNTIME: Final = RuntimeConfig(linger_ms=0, idle_s=0, end_check_s=0, offsets_only_s=0.2, max_records=64)


class Outcome(NamedTuple):
    """What became of a seed."""

    seed: int
    failure: str | None  # the law and what is against it
    effects: int
    digest: str  # of the history
    deaths: Mapping[Point, int]
    passed: Mapping[Point, int]
    last: tuple[str, ...]  # effects
    versions: int
    plans: int


class Settings(NamedTuple):
    """Drawn from the seed too: what the processors are told."""

    joined: int
    limits: Limits
    ahead: int
    traces: bool
    production: ProductionConfig | None  # None = there is no live traffic
    assemble: AssembleConfig
    pack: PackConfig
    trainer: TrainerConfig
    publisher: PublisherConfig
    runtime: RuntimeConfig

    @classmethod
    def drawn(cls, rng: random.Random) -> Settings:
        live, silent = rng.random() < 0.3, rng.random() < 0.5
        groups, share = rng.choice(((2, 1.0), (4, 1.0), (4, 0.5), (2, 0.0)) if live else ((1, 0.0), (2, 0.0)))
        cohort = CohortConfig(
            production_share=share,
            max_age_s=60.0,
            coverage_floor=rng.choice((0.0, 0.3, 0.6)),
            coverage_min_rollouts=rng.choice((1, 2)),
            max_waiting=max(groups, rng.choice((4, 8))),
            max_wait_s=5.0,
        )
        limits = Limits(rng.choice((1, 1, 2)), groups, rng.choice((0, 1, 2, 2, 3)), cohort, silent)
        traces = rng.random() < 0.25
        ahead = rng.choice((0, 1, 1, 2))
        return cls(
            joined=rng.choice((1, 2)),
            limits=limits,
            ahead=ahead,
            traces=traces,
            production=ProductionConfig(
                group_deadline_s=LIVE_DEADLINE_S,
                late_horizon_s=_HORIZON_S,
                grace_s=1.0,
                unjudged="silent" if silent else "drop",
            )
            if live
            else None,
            assemble=AssembleConfig(
                group_deadline_s=DEADLINE_S,
                late_horizon_s=_HORIZON_S,
                grace_s=1.0,
                require_traces=traces,
                incomplete=rng.choice(("drop", "drop", "close_partial")),
            ),
            pack=PackConfig(
                ranks=limits.ranks,
                groups_per_step=limits.groups_per_step,
                token_budget=64,
                max_lag_versions=limits.max_lag,
                max_steps_ahead=ahead,
                max_buffered_groups=max(limits.groups_per_step, rng.choice((3, 8)))
                + (cohort.max_waiting if share else 0),
                cohort=cohort,
            ),
            trainer=TrainerConfig(ranks=limits.ranks, checkpoint_every=rng.choice((1, 2, 3))),
            publisher=PublisherConfig(anchor_every=rng.choice((2, 4))),
            # Where so many die, the crash-loop breaker would set good records aside; some seeds let it.
            runtime=RUNTIME.model_copy(update={"deaths": rng.choice((0, 0, 0, 3))}),
        )


class Bench(NamedTuple):
    """What the processes are made from; a planted bug is another one of these."""

    assemble: Callable[[Log, int, Settings, World, str], Life]  # the last: its process's name
    pack: Callable[[Log, Settings, World, str], Life]
    trainer: Callable[[Log, ObjectStore, Settings, World], Life]
    reverts: float = 0.02  # how often somebody takes the lineage back, a thing that happens


def make_assemble(log: Log, partition: int, settings: Settings, world: World, life: str) -> Life:
    made = drive(settings.assemble, PREFIX, partition)
    return Session(log, made, settings.runtime, world.clock, life=life)


def make_production(log: Log, partition: int, settings: Settings, world: World, life: str) -> Life:
    made = drive(settings.production or ProductionConfig(), PREFIX, partition)
    return Session(log, made, settings.runtime, world.clock, life=life)


def make_pack(log: Log, settings: Settings, world: World, life: str) -> Life:
    made = pack_drive(log, settings.pack, PREFIX, MODEL, LINEAGE)
    return Session(log, made, settings.runtime, world.clock, life=life)


class TrainerLife:
    """The trainer's own thread and its background, one piece at a time in any order."""

    def __init__(self, log: Log, store: ObjectStore, settings: Settings, world: World) -> None:
        self._world = world
        self._work = Inline()
        self._session = TrainerSession(
            arithmetic_run(
                log,
                store,
                settings.trainer,
                prefix=PREFIX,
                model=MODEL,
                lineage=LINEAGE,
                stop=Event(),
                clock=world.clock,
                publisher_config=settings.publisher,
                work=self._work,
                keys=synthetic.PeoplesKeys,
            )
        )

    def turn(self) -> None:
        for _ in range(2):
            ready = self._work.ready()
            which = self._world.rng.randrange(len(ready) + 1)
            if which < len(ready):
                self._work.turn(ready[which])
            else:
                self._session.turn()

    def close(self) -> None:
        self._session.close()


class RevertLife:
    """The command that takes the lineage back to `to`."""

    def __init__(self, log: Log, store: ObjectStore, to: int, settings: Settings, world: World) -> None:
        self._world = world
        self._work = Inline()
        self._reverting = Reverting(
            RevertRun(
                log,
                store,
                PREFIX,
                MODEL,
                LINEAGE,
                to,
                "simulation",
                publisher=settings.publisher,
                clock=world.clock,
                work=self._work,
            )
        )

    def turn(self) -> object:
        for _ in range(4):  # a trainer that starts meanwhile fences it: it hurries
            ready = self._work.ready()
            which = self._world.rng.randrange(len(ready) + 1)
            if which < len(ready):
                self._work.turn(ready[which])
            elif self._reverting.turn() == "done":
                return ENDED
        return None

    def close(self) -> None:
        self._reverting.close()


REAL: Final = Bench(make_assemble, make_pack, TrainerLife)


class Simulation:
    """One seed. `run` raises `Violated`."""

    def __init__(self, seed: int, bench: Bench = REAL, *, effects: int = EFFECTS) -> None:
        world = self.world = World(seed, TARGETS)
        settings = self.settings = Settings.drawn(world.rng)
        self._wanted = effects
        self._reverts = bench.reverts
        if (target := world.faults.target) is not None and target.role == "revert":
            # It comes by its places seldom: where it is to die at one of them, it is tried often.
            self._reverts = max(self._reverts, 0.1)
            world.faults = world.faults._replace(target_hit=world.faults.target_hit // 3)
        self.partitions = topics(settings.joined, settings.limits.ranks)
        self.log = SimulatedLog(world, self.partitions)
        self.store = MemoryStore(world.clock)
        self.workload = Workload(
            world.rng,
            max_lag=settings.limits.max_lag,
            traces=settings.traces,
            live=settings.production is not None,
        )
        self.producers = Producers(world, self.log)
        makes: list[tuple[str, str, Make]] = [
            ("assemble", f"assemble-{p}", partial(_assemble, bench, p, settings, world))
            for p in range(settings.joined)
        ]
        if settings.production is not None:
            makes += [
                ("assemble", f"production-{p}", partial(_production, p, settings, world))
                for p in range(settings.joined)
            ]
        makes.append(("pack", "pack", partial(_pack, bench, settings, world)))
        makes.append(("trainer", "trainer", partial(_trainer, bench, settings, world)))
        self.actors = [Actor(world, self.log, self.store, role, name, make) for role, name, make in makes]
        # A step of the trainer is many small turns, a batch of the others is one.
        often = {"assemble": 2, "pack": 3, "trainer": 6, "revert": 3}
        self.reverter = Errand(world, self.log, self.store, "revert", "revert", self._revert)
        self.actors.append(self.reverter)
        self._weighted = [actor for actor in self.actors for _ in range(often[actor.role])]
        self.laws = Laws(self.log, self.partitions, self.workload.groups, settings.limits)
        world.others = self._while_one_stands

    def run(self) -> None:
        world, rng = self.world, self.world.rng
        self._open(1)
        while world.effects < self._wanted or len(self.workload.groups) < _GROUPS:
            self._step()
            if rng.random() < 0.25:
                self.laws.observe()
        self._heal()
        self.laws.observe()
        check_rest(
            self.laws,
            self.log,
            self.partitions,
            self.workload.groups,
            self.settings.limits,
            {
                config.kind.name: partial(_assembler, config)
                for config in (self.settings.assemble, self.settings.production)
                if config is not None
            },
            world.clock.now_us(),
        )
        check_weights(self.laws, self.store, self.settings.limits)

    def _revert(self, log: Log, store: ObjectStore, _life: str) -> Life:
        """Back to any older version, one that was given up too."""
        to = self.world.rng.randrange(len(self.laws.versions) - 1)
        return RevertLife(log, store, to, self.settings, self.world)

    def _step(self) -> None:
        """One thing that happens: somebody's turn, an arrival, time, a death, a replacement."""
        world, rng = self.world, self.world.rng
        draw = rng.random()
        if draw < 0.07:
            self._open(1 if len(self.workload.groups) < 2 * _GROUPS else 0)
        elif draw < 0.08:
            self.producers.add([self.workload.poison(world.clock.now_us())])
        elif draw < 0.20:
            self.producers.turn()
        elif draw < 0.275:
            self.log.stir()
        elif draw < 0.28:
            self.laws.observe()  # before it is gone
            before_us = world.clock.now_us() - round(_RETENTION_S * 1e6)
            for kind in (SAMPLED, LIVE):
                self.log.retire(kind.closed, before_us, partial(self._needed, kind))
        elif draw < 0.366:
            world.clock.advance(rng.choice((0.02, 0.1, 0.1, 0.3, 0.3, 1.0)))
        elif draw < 0.37:
            world.clock.advance(rng.choice((DEADLINE_S + 2.0, 50.0)))
        elif draw < 0.39:
            rng.choice(self.actors).kill()
        elif draw < 0.41:
            rng.choice(self.actors).replace()
        elif draw < 0.41 + self._reverts:
            if len(self.laws.versions) > 1:
                self.reverter.ask()
        elif draw < 0.46 + self._reverts:
            actor = rng.choice(self.actors)
            if actor.copies:
                actor.turn_copy(rng.randrange(actor.copies))
        else:
            rng.choice(self._weighted).turn()

    def _needed(self, kind: Kind, partition: int) -> set[bytes | None]:
        """Groups that a restart would read of: their marks are kept, or retention is too short for this outage."""
        places = [TopicPartition(topic, partition) for topic in kind.joined]
        committed = self.log.settled(f"{PREFIX}{kind.name}", places)
        return {key for p in places for key in self.log.keys_from(p, committed.get(p, 0))}

    def _while_one_stands(self, _process: Process, turns: int) -> None:
        for _ in range(turns):
            self._step()

    def _open(self, groups: int) -> None:
        world = self.world
        for _ in range(groups):
            latest = max(0, len(self.laws.versions) - 1)
            now_us = world.clock.now_us()
            live = self.settings.production is not None and world.rng.random() < 0.6
            self.producers.add(
                self.workload.open_answer(now_us, latest)
                if live
                else self.workload.open_group(now_us, latest)
            )

    def _heal(self) -> None:
        """No more faults. Everything due is written, and time passes until nothing moves."""
        world = self.world
        world.note("healed")
        world.healed = True
        still = 0
        before: object = None
        for _ in range(_ROUNDS):
            self.producers.turn()
            self.log.stir()
            for actor in self.actors:
                for _ in range(_TURNS):
                    actor.turn()
            for actor in self.actors:
                for which in range(actor.copies):  # those that were replaced go on, until they are told
                    if which < actor.copies:
                        actor.turn_copy(which)
            self.log.stir()
            world.clock.advance(1.0)
            if self.producers.next_us is not None:
                world.clock.advance(max(0.0, (self.producers.next_us - world.clock.now_us()) / 1e6))
            now = self.log.end_offsets(list(self.laws.places)), self.log.committed_anywhere()
            still = still + 1 if now == before and not self.producers.left else 0
            before = now
            if still == 4:
                world.clock.advance(DEADLINE_S)
            if still == 12:
                return
        raise Violated("8", f"nothing came to rest in {_ROUNDS} rounds without faults")


def run_seed(
    seed: int, bench: Bench = REAL, *, effects: int = EFFECTS, trace: Callable[[str], None] | None = None
) -> Outcome:
    """Never raises `Violated`: it is told."""
    simulation = Simulation(seed, bench, effects=effects)
    world = simulation.world
    world.trace = trace
    failure: str | None = None
    with _quiet():
        try:
            simulation.run()
        except Violated as violated:
            failure = str(violated)
        except Exception as error:  # noqa: BLE001  whatever a processor or a check stumbles over fails its seed
            where = traceback.extract_tb(error.__traceback__)[-1]
            failure = f"{type(error).__name__} at {where.filename}:{where.lineno}: {error}"
    return Outcome(
        seed,
        failure,
        world.effects,
        world.digest,
        dict(world.deaths),
        dict(world.passed),
        tuple(world.last),
        len(simulation.laws.versions),
        len(simulation.laws.plans),
    )


def _assemble(
    bench: Bench, partition: int, settings: Settings, world: World, log: Log, _store: ObjectStore, life: str
) -> Life:
    return bench.assemble(log, partition, settings, world, life)


def _production(
    partition: int, settings: Settings, world: World, log: Log, _store: ObjectStore, life: str
) -> Life:
    return make_production(log, partition, settings, world, life)


def _assembler(config: JoinConfig, partition: int) -> Assembler:
    return Assembler(partition, config)


def _pack(bench: Bench, settings: Settings, world: World, log: Log, _store: ObjectStore, life: str) -> Life:
    return bench.pack(log, settings, world, life)


def _trainer(
    bench: Bench, settings: Settings, world: World, log: Log, store: ObjectStore, _life: str
) -> Life:
    return bench.trainer(log, store, settings, world)


@contextmanager
def _quiet() -> Iterator[None]:
    """The processors tell of every restart; here restarts are the rule."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)
