"""pack as a step: `Packer` decides, this feeds it and writes down what it says.

What a restart has to know stands in four places: all versions and reverts in `weight-versions`; the step that was planned
last in the tail of `packed-batches` (all ranks of a plan stand in one transaction, so that of rank 0 tells; a plan that did
not know of the last revert tells nothing, since plans begin anew after it); groups that got their
fate above the committed offsets in `group-fates`, from its mark on; everything else in `groups` from there on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from typing import Final

import structlog

from rollwire.schemas.errors import ConfigError, Refused
from rollwire.schemas.records import Group, GroupFate, PackedBatch, WeightVersion
from rollwire.streams.dead_letter import dead_letter
from rollwire.streams.emit import outgoing
from rollwire.streams.pack import Decision, PackConfig, Packer
from rollwire.streams.reverts import NO_REVERTS, Reverts
from rollwire.streams.seams.limits import check_size
from rollwire.streams.seams.log import Outgoing, TopicPartition
from rollwire.streams.step import Changelog, Marked, Memory, Tail, Taken

_logger = structlog.get_logger("rollwire.pack")

NAME: Final = "pack"
VERSIONS: Final = TopicPartition("weight-versions", 0)
_SOURCE: Final = f"rollwire/{NAME}"


class PackStep:
    """One logical processor for all ranks; implements `rollwire.streams.step.Step`.

    Raises `PlanViolation` for a version that no plan led to, and `ConfigError` for a plan that does not fit a record.
    """

    def __init__(self, config: PackConfig, *, model: str, lineage: str, groups: int, fates: int) -> None:
        """`groups`, `fates`: the partition counts of `groups` and `group-fates`."""
        self._config = config
        self._model = model
        self._lineage = lineage
        self._groups = tuple(TopicPartition("groups", p) for p in range(groups))
        self.inputs: tuple[TopicPartition, ...] = (*self._groups, VERSIONS)
        self.memories: tuple[Memory, ...] = (
            Changelog(VERSIONS),
            Tail(TopicPartition("packed-batches", 0), lambda: bool(self._planned)),
            *(Marked(TopicPartition("group-fates", p), self._decided_above) for p in range(fates)),
        )
        self._versions: list[tuple[int, WeightVersion]] = []
        self._planned: list[
            tuple[int, int | None]
        ] = []  # steps of the tail, and the last revert they knew of
        self._read_before: Mapping[TopicPartition, int] = {}
        self._decided: set[str] = set()
        self._decided_below: dict[int, int] = {}
        self._behind_us: int | None = None  # since when a group waits for the end of `weight-versions`
        self.packer = self._packer(dict.fromkeys(self._groups, 0))

    # -- the step -----------------------------------------------------------------------------------------------

    def restore(self, taken: Taken) -> None:
        record, event = taken
        if isinstance(event, WeightVersion):
            self._versions.append((record.offset, event))
        elif isinstance(event, PackedBatch):
            if event.lineage == self._lineage:
                self._planned.append((event.step, event.newest_revert))
        elif isinstance(event, GroupFate):
            if event.decided_by == NAME:
                self._decided.add(event.group_id)
                for at in event.cut.inputs:  # how far `groups` had been read for that
                    if at.topic == "groups":
                        self._decided_below[at.partition] = max(
                            self._decided_below.get(at.partition, 0), at.offset
                        )
        else:
            _skip(taken)

    def start(self, committed: Mapping[TopicPartition, int], read: Mapping[TopicPartition, int]) -> None:
        self._read_before = dict(read)
        self.packer = self._packer(committed)
        for offset, version in self._versions:
            self.packer.learn(version, offset)
        self._versions.clear()
        _logger.info("pack.start", next_step=self.packer.next_step, latest_version=self.packer.latest_version)

    def feed(self, taken: Sequence[Taken], clock_us: int) -> list[Outgoing]:
        for one in taken:
            record, event = one
            if record.topic == VERSIONS.topic:
                if isinstance(event, WeightVersion):
                    self.packer.learn(event, record.offset)
                else:
                    _skip(one)
            elif isinstance(event, Group | Refused):
                self.packer.receive(record, event)
            elif event is not None:
                self.packer.receive(
                    record, Refused("wrong_schema", f"{type(event).__name__} is no input of pack")
                )
        return self._settle(clock_us, caught_up=False)

    def tick(self, clock_us: int, at_end: Collection[TopicPartition]) -> list[Outgoing]:
        if self._behind_us is not None and VERSIONS not in at_end:
            return []
        return self._settle(clock_us, caught_up=VERSIONS in at_end, at_end=set(self._groups) <= set(at_end))

    def due_us(self) -> int | None:
        times = [at for at in (self._behind_us, self.packer.due_us) if at is not None]
        return min(times, default=None)

    def paused(self) -> Collection[TopicPartition]:
        return self._groups if self.packer.full else ()

    def read(self) -> dict[TopicPartition, int]:
        # A group's fate tells whether it was decided; this tells what was decoded without harm.
        read_to = self.packer.read_to
        return {p: max(read_to[p.partition], self._read_before.get(p, 0)) for p in self._groups}

    def committable(self) -> dict[TopicPartition, int]:
        positions = self.packer.positions
        return {p: positions[p.partition] for p in self._groups}

    # -- inside ---------------------------------------------------------------------------------------------------

    def _packer(self, committed: Mapping[TopicPartition, int]) -> Packer:
        versions = sorted(
            (v for _, v in self._versions if (v.model, v.lineage) == (self._model, self._lineage)),
            key=lambda v: v.version,
        )
        latest = versions[-1].version if versions else 0
        reverts = reduce(Reverts.add, versions, NO_REVERTS)
        planned = [step for step, newest_revert in self._planned if newest_revert == reverts.newest]
        return Packer(
            self._config,
            model=self._model,
            lineage=self._lineage,
            # The topic may have lost old plans to retention; a version proves that its step was planned.
            next_step=max([latest, *planned]) + 1,
            positions={p.partition: committed[p] for p in self._groups},
            decided=self._decided,
            decided_below=self._decided_below,
            reverts=reverts,
        )

    def _decided_above(self) -> dict[TopicPartition, int]:
        return {TopicPartition("groups", p): at for p, at in self.packer.decided_above.items()}

    def _settle(self, clock_us: int, *, caught_up: bool, at_end: bool = False) -> list[Outgoing]:
        """What can be decided now. A version may only be called future at the end of `weight-versions`: until that
        was read, nothing is decided and `tick` is due."""
        outputs: list[Outgoing] = []
        self._behind_us = None
        while True:
            decision = self.packer.decide(clock_us, caught_up=caught_up, at_end=at_end)
            if decision.catch_up:
                self._behind_us = clock_us
                return outputs
            if not decision.changed:
                return outputs
            outputs += self._written(decision, clock_us)

    def _written(self, decision: Decision, clock_us: int) -> list[Outgoing]:
        try:
            events = [outgoing(event, source=_SOURCE, time_us=clock_us) for event in decision.events]
            for event in events:
                check_size(event)
        except Refused as refused:
            raise ConfigError(
                f"an event of step {decision.step} does not fit a record ({refused}): lower `groups_per_step` or add "
                "ranks"
            ) from refused
        letters = [
            dead_letter(record, refused, refused_by=NAME, time_us=clock_us)
            for record, refused in decision.refusals
        ]
        if decision.step is not None:
            _logger.info("pack.step", step=decision.step, latest_version=self.packer.latest_version)
        return events + letters


def _skip(taken: Taken) -> None:
    """A side input: what does not decode is its consumer's to refuse, and cannot have been written by us."""
    record, event = taken
    _logger.warning(
        "pack.skipped",
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        reason=event.reason if isinstance(event, Refused) else type(event).__name__,
    )
