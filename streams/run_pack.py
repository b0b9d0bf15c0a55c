"""Drives `pack` over a log: one logical processor for all ranks, one transaction for plans, fates and offsets.

Take-over order: `init_transactions` (the previous owner's transaction is finished when it returns) -> the end of
`weight-versions` -> the tail of `packed-batches` -> committed offsets -> `group-fates` from the committed mark on.
The mark is the offset of `group-fates` from which fates may belong to groups above the committed offsets; it is kept
as the offset of a consumer group of its own, `<prefix>pack.fates`, which nobody joins.
"""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Final

import structlog

from rollwire.schemas.errors import ConfigError, DeadlineExceeded, LogUnavailable, Refused, TransactionUnknown
from rollwire.schemas.records import Group, GroupFate, PackedBatch, WeightVersion
from rollwire.streams.dead_letter import dead_letter
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.pack import Decision, PackConfig, Packer
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.log import Log, Reader, Record, TopicPartition, TransactionalWriter
from rollwire.streams.seams.scan import scan

logger = structlog.get_logger()

PATIENCE_S: Final = 120.0  # how long the broker may be away, attempt after attempt
_TRANSACTION_S: Final = 8.0  # take-over and commit: below the 10 s that a shutdown may take
_VERSIONS: Final = TopicPartition("weight-versions", 0)
_SOURCE: Final = "rollwire/pack"


def run_pack(
    log: Log,
    config: PackConfig,
    *,
    prefix: str,
    model: str,
    lineage: str,
    stop: threading.Event,
    clock: Clock | None = None,
) -> None:
    """Packs until `stop` is set; returns within one transaction's time.

    After a transaction of unknown outcome, or an outage shorter than `PATIENCE_S`, everything is rebuilt from the log
    with a new producer. Raises `Fenced` (another pack took over), `OffsetLost`, `PlanViolation`, `ConfigError`
    (a plan does not fit a record, or fewer partitions than ranks) and, after the patience, `LogUnavailable`.
    """
    clock = clock or SystemClock()
    if log.partitions("packed-batches") < config.ranks:
        raise ConfigError(
            f"packed-batches has {log.partitions('packed-batches')} partitions, one for each of {config.ranks} ranks "
            "is needed: lower `ranks` or add partitions"
        )
    healthy_s = clock.monotonic_s()
    while not stop.is_set():
        session: _Session | None = None
        try:
            with (
                closing(log.transactional_writer(f"{prefix}pack", _TRANSACTION_S)) as writer,
                closing(log.reader()) as reader,
            ):
                session = _Session(log, writer, reader, config, f"{prefix}pack", model, lineage, clock)
                session.run(stop)
        except (TransactionUnknown, LogUnavailable, DeadlineExceeded) as error:
            healthy_s = healthy_s if session is None else session.healthy_s
            if clock.monotonic_s() - healthy_s > PATIENCE_S:
                raise
            logger.warning("pack.restart", error=str(error), kind=type(error).__name__)
            stop.wait(0.2)


def last_planned_step(log: Log, lineage: str) -> int:
    """The step of the last plan of `lineage`, from the tail of `packed-batches`; 0 = none.

    All ranks of a plan stand in one transaction, so rank 0 tells. The tail is searched in windows that double, since
    control records and other lineages may fill any stretch.
    """
    ranks = [TopicPartition("packed-batches", p) for p in range(log.partitions("packed-batches"))]
    ends, begin = log.end_offsets(ranks), log.beginning_offsets(ranks[:1])[ranks[0]]
    window = 16
    while ends[ranks[0]] > begin:
        low = max(begin, ends[ranks[0]] - window)
        last = 0
        for record in scan(log, ["packed-batches"], start={**ends, ranks[0]: low}):
            batch = _decode(record)
            if isinstance(batch, PackedBatch) and batch.lineage == lineage and record.partition == 0:
                last = max(last, batch.step)
        if last or low == begin:
            return last
        window *= 4
    return 0


class _Session:
    """One producer's life: state rebuilt from the log, then the loop."""

    def __init__(
        self,
        log: Log,
        writer: TransactionalWriter,
        reader: Reader,
        config: PackConfig,
        group: str,
        model: str,
        lineage: str,
        clock: Clock,
    ) -> None:
        self._log = log
        self._writer = writer
        self._reader = reader
        self._group = group
        self._clock = clock
        self._groups = [TopicPartition("groups", p) for p in range(log.partitions("groups"))]
        self._fates = [TopicPartition("group-fates", p) for p in range(log.partitions("group-fates"))]
        versions = [(r.offset, v) for r in scan(log, ["weight-versions"]) if (v := _version(r)) is not None]
        latest = max((v.version for _, v in versions if v.lineage == lineage and v.model == model), default=0)
        committed = log.committed(self._group, self._groups)
        marks = log.committed(_marks_group(self._group), self._fates)
        begins = log.beginning_offsets([*self._groups, *self._fates])
        positions = {p.partition: committed.get(p, begins[p]) for p in self._groups}
        self._marks = {p: max(mark, begins[p]) for p, mark in marks.items()}
        decided, decided_below = self._settled()
        self.packer = Packer(
            config,
            model=model,
            lineage=lineage,
            # The topic may have lost old plans to retention; a version proves that its step was planned.
            next_step=max(last_planned_step(log, lineage), latest) + 1,
            positions=positions,
            decided=decided,
            decided_below=decided_below,
        )
        for offset, version in versions:
            self.packer.learn(version, offset)
        self._keep_marks = True
        self._groups_paused = False
        self._reader.assign(
            {
                **{p: positions[p.partition] for p in self._groups},
                _VERSIONS: versions[-1][0] + 1 if versions else log.beginning_offsets([_VERSIONS])[_VERSIONS],
            }
        )
        self.healthy_s = clock.monotonic_s()
        logger.info("pack.start", next_step=self.packer.next_step, latest_version=self.packer.latest_version)

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self._backpressure()
            records = self._reader.poll(500, 0.2)
            self.healthy_s = self._clock.monotonic_s()
            for record in records:
                self._take(record)
            if records:
                self._settle(stop)

    def _take(self, record: Record) -> None:
        if record.topic == "weight-versions":
            version = _version(record)
            if version is not None:
                self.packer.learn(version, record.offset)
            return
        try:
            event = decode_record(record)
        except Refused as refused:
            self.packer.receive(record, refused)
            return
        if not isinstance(event, Group):
            self.packer.receive(record, Refused("wrong_schema", f"{type(event).__name__} on groups"))
            return
        self.packer.receive(record, event)

    def _settle(self, stop: threading.Event) -> None:
        """Commits decisions until nothing changes."""
        while True:
            self._keep_marks = self.packer.drops_above
            decision = self.packer.decide(self._clock.now_us(), caught_up=False)
            if decision.catch_up:
                self._catch_up()
                decision = self.packer.decide(self._clock.now_us(), caught_up=True)
            if not decision.changed:
                return
            self._commit(decision)
            if stop.is_set():
                return

    def _catch_up(self) -> None:
        """Reads `weight-versions` to its end: a version may only be called future then. The reader meets the same
        records again; learning one twice changes nothing."""
        for record in scan(self._log, ["weight-versions"], start={_VERSIONS: self.packer.versions_offset}):
            version = _version(record)
            if version is not None:
                self.packer.learn(version, record.offset)

    def _commit(self, decision: Decision) -> None:
        # Read before writing: the fates of this transaction lie at or above the mark.
        if len(self._marks) < len(self._fates) or not self._keep_marks:
            self._marks = self._log.end_offsets(self._fates)
        time_us = self._clock.now_us()
        offsets = {p: decision.positions[p.partition] for p in self._groups}
        self._writer.begin()
        try:
            self._writer.write(
                [outgoing(event, source=_SOURCE, time_us=time_us) for event in decision.events]
                + [
                    dead_letter(r, refused, refused_by="pack", time_us=time_us)
                    for r, refused in decision.refusals
                ]
            )
        except Refused as refused:
            self._writer.abort()
            raise ConfigError(
                f"an event of step {decision.step} does not fit a record ({refused}): lower `groups_per_step` or add "
                "ranks"
            ) from refused
        self._writer.commit(
            self._group, offsets, _TRANSACTION_S, also={_marks_group(self._group): self._marks}
        )
        if decision.step is not None:
            logger.info("pack.step", step=decision.step, latest_version=self.packer.latest_version)

    def _backpressure(self) -> None:
        if self.packer.full and not self._groups_paused:
            self._reader.pause(self._groups)
            self._groups_paused = True
        elif self._groups_paused and not self.packer.full:
            self._reader.resume(self._groups)
            self._groups_paused = False

    def _settled(self) -> tuple[set[str], dict[int, int]]:
        """Ids of the groups that `pack` settled from the marks on, and how far `groups` had been read for that.
        Without marks there are none: they are committed with the first fate."""
        if not self._marks:
            return set(), {}
        settled: set[str] = set()
        read_to: dict[int, int] = {}
        start = {**self._log.end_offsets(self._fates), **self._marks}
        for record in scan(self._log, ["group-fates"], start=start):
            fate = _decode(record)
            if isinstance(fate, GroupFate) and fate.decided_by == "pack":
                settled.add(fate.group_id)
                for at in fate.cut.inputs:
                    if at.topic == "groups":
                        read_to[at.partition] = max(read_to.get(at.partition, 0), at.offset)
        return settled, read_to


def _marks_group(group: str) -> str:
    return f"{group}.fates"


def _decode(record: Record) -> object:
    """A side input: what does not decode is its consumer's to refuse, and cannot have been written by us."""
    try:
        return decode_record(record)
    except Refused as refused:
        logger.warning(
            "pack.skipped",
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            reason=refused.reason,
        )
        return None


def _version(record: Record) -> WeightVersion | None:
    event = _decode(record)
    return event if isinstance(event, WeightVersion) else None
