"""Step plans made again from rollouts, rewards and fates, for when `groups` and `packed-batches` are gone.

    group-fates      which groups a plan had, in which order, and the cut it was made with
    inputs of a join the groups themselves
    notices          with which settings both were decided
    train-steps      the digest that the plan must have

A fate without a place (written before fates had one) leaves the order to `groups`, where that still stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Final, NamedTuple

import structlog

from rollwire.schemas.errors import OffsetLost, Refused, ReplayDiverged
from rollwire.schemas.records import Cut, Event, Group, GroupFate, PackedBatch, TrainStep, WeightVersion
from rollwire.streams.assemble_answer import BASELINE
from rollwire.streams.assemble_config import LIVE, SAMPLED
from rollwire.streams.emit import decode_record
from rollwire.streams.pack_cohort import Cohort, judge_cohort
from rollwire.streams.pack_layout import PlanFrame, lay_out
from rollwire.streams.pack_step import VERSIONS
from rollwire.streams.replay.aside import set_aside
from rollwire.streams.replay.join import Join
from rollwire.streams.replay.settings import Spoken, read_spoken
from rollwire.streams.replay.source import Source, Timed
from rollwire.streams.reverts import NO_REVERTS, Reverts
from rollwire.streams.seams.log import Log, Record
from rollwire.streams.seams.places import partitions_of
from rollwire.streams.seams.scan import scan

_logger = structlog.get_logger("rollwire.replay")

_FATES: Final = "group-fates"
_INPUTS: Final = (*SAMPLED.joined, *(topic for topic in LIVE.joined if topic not in SAMPLED.joined))


class Planned(NamedTuple):
    """One plan as its groups' fates tell it."""

    step: int
    cut: Cut
    group_ids: tuple[str, ...]  # in the plan's order


class _Home(NamedTuple):
    """Of a group: the join that it is in."""

    processor: str
    partition: int
    settings_from_us: int


class _Past(NamedTuple):
    """What the log says of a lineage beside its groups."""

    steps: Mapping[int, TrainStep]
    versions: tuple[tuple[int, WeightVersion], ...]  # with their offsets

    def reverts_below(self, offset: int) -> Reverts:
        return reduce(Reverts.add, (v for at, v in self.versions if at < offset), NO_REVERTS)


def rederived_plans(
    log: Log, *, lineage: str, first_step: int, last_step: int, spoken: Spoken | None = None
) -> Iterator[tuple[PackedBatch, ...]]:
    """The plans of the steps that were trained from `first_step` to `last_step`, in order: of each the slices of all ranks.
    A revert is a step without a plan and gives nothing.

    `spoken`: settings that come before those the log says. Every plan has the digest that `train-steps` names, or
    `ReplayDiverged` is raised. Raises `OffsetLost` where the log has no more what a plan was made of, `ConfigError` where
    it does not say by which settings.
    """
    past = _past(log, lineage)
    reverted = {v.version for _, v in past.versions if v.reverts_to is not None}
    wanted = [s for s in range(first_step, last_step + 1) if s in past.steps and s not in reverted]
    if not wanted:
        return
    plans = planned(log, wanted[0], wanted[-1])
    missing = [step for step in wanted if not plans.get(step)]
    if missing:
        raise OffsetLost(
            f"{_FATES} says of step {missing[0]} no group that was kept for it: was it shortened by retention, without an archive?"
        )
    yield from _Deriving(log, lineage, past, spoken or read_spoken(log)).plans(wanted, plans)


def planned(log: Log, first_step: int, last_step: int) -> dict[int, list[Planned]]:
    """Step -> the plans that were made for it: several where a revert took it back, or lineages share topics."""
    found: dict[tuple[int, Cut], list[tuple[int | None, Record, str]]] = {}
    for record, event in _events(log, (_FATES,)):
        if isinstance(event, GroupFate) and event.fate == "kept" and event.for_version is not None:
            step = event.for_version + 1
            if first_step <= step <= last_step:
                found.setdefault((step, event.cut), []).append((event.place, record, event.group_id))
    unplaced = {
        name for fates in found.values() for place, _, name in fates if place is None and len(fates) > 1
    }
    order = _order(log, unplaced) if unplaced else {}
    plans: dict[int, list[Planned]] = {}
    for (step, cut), fates in found.items():
        plans.setdefault(step, []).append(Planned(step, cut, tuple(_ordered(step, fates, order))))
    return plans


def _ordered(
    step: int, fates: Sequence[tuple[int | None, Record, str]], order: Mapping[str, tuple[int, int, int]]
) -> Iterator[str]:
    places = {name: place for place, _, name in fates if place is not None}
    names = dict.fromkeys(name for *_, name in fates)  # a repeat stands there once
    if len(places) == len(names):
        yield from sorted(names, key=places.__getitem__)
    elif all(name in order for name in names):
        yield from sorted(names, key=order.__getitem__)
    elif len({record.partition for _, record, _ in fates}) == 1:
        yield from names
    else:
        raise OffsetLost(
            f"the order of the {len(names)} groups of step {step} is not known: their fates name no places, and `groups` is gone"
        )


def _order(log: Log, names: set[str]) -> dict[str, tuple[int, int, int]]:
    """Of groups of old fates: where they stand in `groups`, as `pack` merged them."""
    found: dict[str, tuple[int, int, int]] = {}
    highest: dict[int, int] = {}
    for record in scan(log, ["groups"], lost=lambda _: None):
        at = highest[record.partition] = max(highest.get(record.partition, 0), record.timestamp_ms)
        name = (record.key or b"").decode(errors="replace")
        if name in names:
            found.setdefault(name, (at, record.partition, record.offset))
    return found


class _Deriving:
    """Reads the joins' inputs once, forwards, and makes plans of the groups as they come together."""

    def __init__(self, log: Log, lineage: str, past: _Past, spoken: Spoken) -> None:
        self._log = log
        self._lineage = lineage
        self._past = past
        self._spoken = spoken
        self._aside = set_aside(log)
        self._joins: dict[_Home, Join] = {}
        self._cuts: dict[bytes, Cut] = {}  # of the plans of wanted groups
        self._homes: dict[str, _Home] = {}
        self._clock_us = 0

    def plans(
        self, wanted: Sequence[int], plans: Mapping[int, Sequence[Planned]]
    ) -> Iterator[tuple[PackedBatch, ...]]:
        for step in wanted:
            for plan in plans[step]:
                self._cuts.update(dict.fromkeys((name.encode() for name in plan.group_ids), plan.cut))
        with Source(self._log, partitions_of(self._log, _INPUTS), lost=_say_lost) as source:
            merged = source.merged()
            for step in wanted:
                yield self._plan(self._past.steps[step], plans[step], merged)

    def _plan(
        self, step: TrainStep, candidates: Sequence[Planned], merged: Iterator[Timed]
    ) -> tuple[PackedBatch, ...]:
        names = {name for plan in candidates for name in plan.group_ids}
        waiting = set(names)
        while waiting := {name for name in waiting if not self._ready(name)}:
            timed = next(merged, None)
            if timed is None:
                break
            self._take(timed)
        why = ""
        groups: dict[str, Group] = {}
        for plan in candidates:
            try:
                groups |= {name: self._group(name, plan.cut) for name in plan.group_ids if name not in groups}
                made = self._lay_out(plan, [groups[name] for name in plan.group_ids])
            except (OffsetLost, Refused) as error:
                why = why or str(error)
                continue
            if made[0].plan_digest == step.plan_digest:
                return made
            why = f"made again, the plan has the digest {made[0].plan_digest[:16]}"
        raise ReplayDiverged(
            f"step {step.step} was trained on the plan {step.plan_digest[:16]}; from {', '.join(_INPUTS)} it does not come out: {why}"
        )

    def _ready(self, name: str) -> bool:
        home = self._homes.get(name)
        if home is None:
            return False
        join = self._joins[home]
        return not join.is_open(name) or join.whole(name) or self._clock_us > join.deadline_us(name)

    def _take(self, timed: Timed) -> None:
        record = timed.record
        self._clock_us = timed.at_us
        cut = self._cuts.get(record.key or b"")
        if cut is None or (record.topic, record.partition, record.offset) in self._aside:
            return
        for kind in (SAMPLED, LIVE):
            if record.topic not in kind.joined:
                continue
            if not self._spoken.since(kind.name):
                continue
            since = self._spoken.at(kind.name, cut.clock_us)
            home = _Home(kind.name, record.partition, since.from_us)
            config = self._spoken.join(kind.name, since)
            if record.topic not in config.topics:
                continue
            if home not in self._joins:
                self._joins[home] = Join(record.partition, config)
            self._joins[home].read_on(record)
            name = (record.key or b"").decode()
            if self._joins[home].is_open(name):
                self._homes[name] = home

    def _group(self, name: str, cut: Cut) -> Group:
        home = self._homes.pop(name, None)
        if home is None or not self._joins[home].is_open(name):
            raise OffsetLost(f"nothing of group {name} is in the log any more")
        for output in self._joins[home].close(name, cut):
            if output.topic == "groups":
                event = decode_record(Record(output.topic, 0, 0, 0, output.key, output.value, output.headers))
                if isinstance(event, Group):
                    return event
        raise OffsetLost(f"group {name} is not whole any more")

    def _lay_out(self, plan: Planned, groups: list[Group]) -> tuple[PackedBatch, ...]:
        since = self._spoken.at("pack", plan.cut.clock_us, self._lineage)
        config = self._spoken.pack(since)
        live = [group for group in groups if group.baseline == BASELINE]
        cohort: Cohort | None = None
        laid = [group for group in groups if group.baseline != BASELINE]
        if live:
            judged = judge_cohort(live, config.cohort)
            if not isinstance(judged, Cohort):
                raise Refused(judged.reason, judged.detail)
            cohort = judged
            laid += judged.groups
        known = next((at.offset for at in plan.cut.inputs if (at.topic, at.partition) == VERSIONS), 0)
        return lay_out(
            laid,
            PlanFrame(
                model=since.model,
                lineage=self._lineage,
                step=plan.step,
                base_version=plan.step - 1,
                ranks=config.ranks,
                token_budget=config.microbatch_tokens,
                max_lag_versions=config.max_lag_versions,
                cost=config.cost,
                cut=plan.cut,
                objective=config.objective,
                newest_revert=self._past.reverts_below(known).newest,
                context_parallel=config.context_parallel,
                cohort=cohort,
            ),
        )


def _past(log: Log, lineage: str) -> _Past:
    steps: dict[int, TrainStep] = {}
    versions: list[tuple[int, WeightVersion]] = []
    for record, event in _events(log, ("train-steps", VERSIONS.topic)):
        if isinstance(event, TrainStep) and event.lineage == lineage:
            steps.setdefault(event.step, event)
        elif isinstance(event, WeightVersion) and event.lineage == lineage:
            versions.append((record.offset, event))
    return _Past(steps, tuple(versions))


def _events(log: Log, topics: Sequence[str]) -> Iterator[tuple[Record, Event]]:
    """What decodes; of what is lost only the rest is given."""
    for record in scan(log, topics, lost=_say_lost):
        try:
            yield record, decode_record(record)
        except Refused:
            continue


def _say_lost(lost: object) -> None:
    _logger.warning("replay.lost", what=str(lost))
