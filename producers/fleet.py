"""A rollout worker: opens groups, samples them on an engine, writes `rollouts` and `routing-traces`, follows the weights.

One thread decodes without a pause: between two decode steps it swaps in a staged version (running requests keep their KV
cache, so their rollouts carry several version spans), takes back the slots of groups whose fate is known, and refills the
engine. A second thread writes what is finished (`outbox`).

A restart forgets the groups that were open: `assemble` drops them at their deadline. Tasks are independent draws, so
nothing is owed a second try, but long rollouts are likelier to be lost; the fates tell how many were (C15).
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

import structlog
from pydantic import BaseModel, ConfigDict, Field

from rollwire.producers.emit import decode_record
from rollwire.producers.engine_http import EngineConfig
from rollwire.producers.outbox import Outbox
from rollwire.producers.slots import SlotCounts, Slots
from rollwire.producers.trajectory import Origin, Trajectory, narrowest_dtype
from rollwire.schemas.errors import DeadlineExceeded, LogUnavailable, Refused, TargetFailed
from rollwire.schemas.ids import new_group_id
from rollwire.schemas.records import GroupFate
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.engine import Engine, Sampled, SampleRequest
from rollwire.streams.seams.environment import Environment
from rollwire.streams.seams.log import Log, Reader, TopicPartition
from rollwire.streams.seams.store import ObjectStore
from rollwire.streams.seams.turns import after_stretch
from rollwire.streams.seams.weights import Staged, WeightSource

_log = structlog.get_logger()

SOURCE: Final = "rollwire/fleet"
FATES: Final = "group-fates"
OUTPUT: Final = "rollouts"


class FleetConfig(BaseModel):
    """One sampling replica."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fleet: str = Field(default="fleet", description="name of the fleet: all replicas that follow one model")
    replica: str = Field(default="fleet-0", description="name of this replica; unique in the fleet")
    weights_bucket: str | None = Field(
        default=None,
        description="bucket that this fleet reads weights from (a copy near it, say); none: the run's",
    )
    max_open_groups: int = Field(
        default=96,
        ge=1,
        description="slots: groups sampled or awaiting their fate; bounds how far sampling runs ahead",
    )
    group_size: int = Field(default=8, ge=1, description="rollouts of one prompt")
    max_running: int = Field(default=512, ge=1, description="requests handed to the engine at once")
    temperature: float = Field(
        default=1.0, gt=0, description="sampling temperature; logprobs are at temperature 1"
    )
    seed: int = Field(default=0, ge=0, description="of the tasks and the samples")
    kv_at_swap: Literal["keep", "recompute"] = Field(
        default="keep",
        description="what becomes of the KV cache of running requests at a swap: kept (older keys and values, no pause), "
        "or computed anew with the new weights (the next decode step reads every running request from its start)",
    )
    record_routes: bool = Field(default=True, description="write routing traces")
    engine: EngineConfig = Field(
        default=EngineConfig(), description="what samples: the built-in engine, or vLLM or SGLang over HTTP"
    )
    swap_retry_s: float = Field(
        default=5.0, gt=0, description="pause after a version that the engine did not take"
    )
    pack_routes: bool = Field(
        default=True, description="write expert ids in as few bits as they need; off, one byte an id"
    )
    num_experts: int = Field(default=8, ge=1, description="experts of a MoE layer, told by the traces")
    moe_layers: tuple[int, ...] | None = Field(
        default=None, description="global indices of the MoE layers; None = every layer"
    )
    start_s: float = Field(default=300.0, gt=0, description="seconds to wait for the first version")
    drain_s: float = Field(
        default=8.0, gt=0, description="seconds to finish or hand back what is open at a stop"
    )
    patience_s: float = Field(default=300.0, gt=0, description="seconds without the broker before giving up")
    fates_every_s: float = Field(default=0.02, gt=0, description="seconds between looks at `group-fates`")


class FleetReport(NamedTuple):
    """What one life of the replica did."""

    slots: SlotCounts
    written: int  # rollouts, durable
    refused: int  # rollouts that the codec refused
    handed_back: int  # rollouts ended by the stop
    tokens: int  # sampled
    swaps: int
    version: int


def derive_seed(*parts: object) -> int:
    """63 bits that depend on every part and on nothing else."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def run_fleet(
    log: Log,
    engine: Engine,
    environment: Environment,
    weights: WeightSource,
    config: FleetConfig | None = None,
    *,
    model: str,
    lineage: str,
    prefix: str,
    stop: threading.Event,
    clock: Clock | None = None,
    observe: Callable[[SlotCounts], None] | None = None,
    random_bits: Callable[[], int] | None = None,
    store: ObjectStore | None = None,
) -> FleetReport:
    """Samples until `stop`, then finishes or hands back what is open within `drain_s`.

    `observe` is told the slots' counts each time the loop goes round. `random_bits` makes ids unique (74 bits).
    `store` takes routing traces above 512 KiB; without it they are refused, and their rollouts with them.
    Raises `DeadlineExceeded` where no version comes within `start_s`, `LogUnavailable` when the broker stays away for
    `patience_s`, `ConfigError` where the engine breaks its contract.
    """
    config = config or FleetConfig()
    fleet = _Fleet(
        log, engine, environment, weights, config, model, lineage, clock or SystemClock(), random_bits, store
    )
    return fleet.run(stop, observe)


class _Fates:
    """Follows `group-fates` from where it ended at the start: only groups opened later are ours."""

    def __init__(self, log: Log, clock: Clock, patience_s: float) -> None:
        self._log = log
        self._clock = clock
        self._patience_s = patience_s
        partitions = [TopicPartition(FATES, p) for p in range(log.partitions(FATES))]
        self._positions = log.end_offsets(partitions)
        self._reader: Reader | None = None
        self._away_since: float | None = None

    def poll(self, wait_s: float) -> list[GroupFate]:
        """New fates; waits up to `wait_s` for the first. Raises `LogUnavailable` after `patience_s` without a broker."""
        try:
            if self._reader is None:
                self._reader = self._log.reader()
                self._reader.assign(self._positions)
            records = self._reader.poll(1_000, wait_s)
            self._positions = self._reader.positions()
            self._away_since = None
        except LogUnavailable as error:
            now = self._clock.monotonic_s()
            self._away_since = now if self._away_since is None else self._away_since
            if now - self._away_since > self._patience_s:
                raise
            _log.warning("fates_reader_recovers", error=str(error))
            self.close()
            return []
        fates: list[GroupFate] = []
        for record in records:
            try:
                event = decode_record(record)
            except Refused as refused:
                _log.warning(
                    "fate_refused", offset=record.offset, reason=refused.reason, detail=refused.detail
                )
                continue
            if isinstance(event, GroupFate):
                fates.append(event)
        return fates

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class _Fleet:
    def __init__(
        self,
        log: Log,
        engine: Engine,
        environment: Environment,
        weights: WeightSource,
        config: FleetConfig,
        model: str,
        lineage: str,
        clock: Clock,
        random_bits: Callable[[], int] | None,
        store: ObjectStore | None,
    ) -> None:
        self._log = log
        self._store = store
        self._engine = engine
        self._environment = environment
        self._weights = weights
        self._config = config
        self._clock = clock
        self._random_bits = random_bits or (lambda: secrets.randbits(74))
        self._origin = Origin(
            model=model,
            lineage=lineage,
            environment=environment.name,
            fleet=config.fleet,
            replica=config.replica,
            token_dtype=narrowest_dtype(environment.vocab_size),
            temperature=config.temperature,
            num_experts=config.num_experts,
            moe_layers=config.moe_layers,
            pack_routes=config.pack_routes,
        )
        self._slots = Slots(config.max_open_groups)
        self._running: dict[str, Trajectory] = {}
        self._groups = 0
        self._tokens = 0
        self._swaps = 0
        self._handed_back = 0
        self._next_look = 0.0
        self._next_swap = 0.0
        self._life = self._new_life()

    def run(self, stop: threading.Event, observe: Callable[[SlotCounts], None] | None) -> FleetReport:
        config, clock = self._config, self._clock
        fates = _Fates(self._log, clock, config.patience_s)
        outbox = Outbox(
            self._log, source=SOURCE, clock=clock, patience_s=config.patience_s, store=self._store
        )
        try:
            if self._first_version(stop):
                while not stop.is_set():
                    self._swap(self._weights.staged())
                    self._take_back(fates, outbox)
                    self._open_groups()
                    self._finish(self._engine.step(), outbox)
                    outbox.check()
                    if observe is not None:
                        observe(self._slots.counts)
            self._drain(outbox)
        finally:
            fates.close()
            outbox.close()
        report = FleetReport(
            self._slots.counts,
            outbox.written,
            outbox.refused,
            self._handed_back,
            self._tokens,
            self._swaps,
            self._engine.version,
        )
        self._weights.stopped(self._handed_back)
        _log.info("fleet_stopped", **report._asdict())
        return report

    def _new_life(self) -> int:
        """0 where nothing was ever sampled, so that a run's first tasks follow from its seed alone; later lives draw
        other tasks than the ones before them."""
        partitions = [TopicPartition(OUTPUT, p) for p in range(self._log.partitions(OUTPUT))]
        return self._clock.now_us() if any(self._log.end_offsets(partitions).values()) else 0

    def _first_version(self, stop: threading.Event) -> bool:
        deadline = self._clock.monotonic_s() + self._config.start_s
        while not stop.is_set():
            try:
                self._swap(self._weights.wait(0.5))
                return True
            except (DeadlineExceeded, TargetFailed):  # no version, or no server to take it, yet
                if self._clock.monotonic_s() > deadline:
                    raise
                stop.wait(0.1)
        return False

    def _swap(self, staged: Staged | None) -> None:
        if staged is None:
            return
        began = self._clock.monotonic_s()
        if began < self._next_swap:
            return
        try:
            self._engine.swap(staged.event.version, staged.state)
        except TargetFailed as error:  # a server of its own; the version before serves
            if self._engine.version < 0:
                raise
            _log.warning("swap_failed", version=staged.event.version, error=str(error))
            self._next_swap = self._clock.monotonic_s() + self._config.swap_retry_s
            return
        pause_ms = (self._clock.monotonic_s() - began) * 1e3
        self._swaps += 1
        self._weights.swapped(staged, pause_ms, len(self._running))

    def _take_back(self, fates: _Fates, outbox: Outbox) -> None:
        """Slots of groups with a fate, or with no rollout that could be written. Sleeps only when nothing else is to do."""
        now = self._clock.monotonic_s()
        idle = not self._running and self._slots.free == 0
        if not idle and now < self._next_look:
            return
        self._next_look = now + self._config.fates_every_s
        for fate in fates.poll(0.05 if idle else 0.0):
            self._slots.give_back(fate)
        for group_id in outbox.take_refused():
            self._slots.lost(group_id, self._config.group_size)

    def _open_groups(self) -> None:
        config = self._config
        while self._slots.free > 0 and len(self._running) + config.group_size <= max(
            config.max_running, config.group_size
        ):
            task_seed = derive_seed("task", config.seed, config.replica, self._life, self._groups)
            self._groups += 1
            task = self._environment.reset(task_seed)
            now_us = self._clock.now_us()
            group_id = new_group_id(now_us, self._random_bits())
            self._slots.open(group_id)
            for index in range(config.group_size):
                seed = derive_seed("sample", task_seed, index)
                trajectory = Trajectory(group_id, index, config.group_size, task, seed, now_us)
                self._running[trajectory.rollout_id] = trajectory
                self._submit(trajectory, self._environment.max_new_tokens)

    def _submit(self, trajectory: Trajectory, max_new_tokens: int) -> None:
        turns_seed = derive_seed("turn", trajectory.seed, trajectory.sampled_count)
        request = SampleRequest(
            request_id=trajectory.rollout_id,
            prompt_ids=trajectory.token_ids,
            max_new_tokens=max_new_tokens,
            seed=trajectory.seed if trajectory.sampled_count == 0 else turns_seed,
            temperature=self._config.temperature,
            record_routes=self._config.record_routes,
            stop_ids=trajectory.task.stop_ids,
        )
        self._engine.submit([request])

    def _finish(self, sampled: list[Sampled], outbox: Outbox) -> None:
        now_us = self._clock.now_us()
        for each in sampled:
            trajectory = self._running[each.request_id]
            trajectory.add_sampled(each)
            self._tokens += each.token_ids.size
            follows = after_stretch(
                self._environment,
                trajectory.task.task,
                trajectory.sampled_ids,
                trajectory.tokens_used,
                each.finish_reason,
            )
            if follows.finish_reason is None:
                trajectory.add_tool(follows.tool_ids)
                self._submit(trajectory, follows.max_new_tokens)
                continue
            del self._running[each.request_id]
            outbox.put(trajectory.finish(self._origin, follows.finish_reason, now_us))

    def _drain(self, outbox: Outbox) -> None:
        """Finishes what is open, or hands it back as aborted: `assemble` then drops the group without waiting. A request
        that has not sampled a token leaves nothing to hand back; its group ends at the deadline."""
        config = self._config
        began = self._clock.monotonic_s()
        while self._running and self._clock.monotonic_s() - began < config.drain_s * 0.6:
            self._finish(self._engine.step(), outbox)
        if self._running:
            handed_back = self._engine.abort()
            self._handed_back = len(handed_back)
            self._finish(handed_back, outbox)
        left = config.drain_s - (self._clock.monotonic_s() - began)
        if not outbox.flush(max(left, 0.5)):
            _log.warning("drain_incomplete", rollouts=outbox.pending)
