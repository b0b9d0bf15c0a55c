"""Both readers on a log, and the verdict on what they were given: a whole story is good, one that was doubled is not."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec
import pytest

from rollwire.consumers.trainer.sums import NOTHING, Sums, fold, state_of
from rollwire.kernels.advantages import group_advantages
from rollwire.kernels.digest import StateDigest
from rollwire.ops.chaos.readers import Watcher, read_all
from rollwire.ops.chaos.retrained import judge_weights
from rollwire.ops.chaos.verdict import Verdict, judge
from rollwire.ops.chaos.workload import (
    EMITTED,
    FATES,
    LINEAGE,
    MODEL,
    SIZE,
    Kind,
    Planned,
    Workload,
    kinds,
    known,
    record_of,
    reward,
    rollout,
)
from rollwire.ops.stack import StackInfo
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import Refused
from rollwire.schemas.golden import all_examples
from rollwire.schemas.ids import opened_us
from rollwire.schemas.records import (
    Cut,
    Event,
    Group,
    GroupFate,
    Member,
    OffsetRange,
    PackedBatch,
    TrainStep,
    WeightVersion,
)
from rollwire.streams.dead_letter import dead_letter
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.pack_layout import build_microbatch, plan_digest
from rollwire.streams.seams.log import Log, Outgoing, Record
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.log_memory import MemoryLog

LOAD = Workload(
    seed=2, groups=60, rate=100.0, begin_us=1_767_225_600_000_000, deadline_s=5.0, horizon_s=10.0, groups_per_step=10
)  # fmt: skip
KNOWN = known(LOAD)
CUT = Cut(inputs=(), clock_us=LOAD.begin_us)
AT_US = LOAD.begin_us
E = TypeVar("E", bound=Event)


@pytest.fixture(params=["memory", pytest.param("live", marks=pytest.mark.system)])
def log(request: pytest.FixtureRequest) -> Iterator[Log]:
    if request.param == "memory":
        yield MemoryLog({name: spec.partitions for name, spec in TOPICS.items()})
        return
    stack: StackInfo = request.getfixturevalue("stack")
    live = KafkaLog(stack.bootstrap, request.getfixturevalue("prefix"))
    yield live
    live.close()


def example(kind: type[E]) -> E:
    for one in all_examples():
        if one.value is not None:
            event = decode_record(Record(one.topic, 0, 0, 0, one.key, one.value, tuple(one.headers)))
            if isinstance(event, kind):
                return event
    raise LookupError(kind)


def group_of(number: int, kind: Kind) -> Group:
    rollouts = [rollout(LOAD, kind, number, index) for index in range(SIZE)]
    rewards = [reward(LOAD, kind, number, index).reward for index in range(SIZE)]
    first, advantages = rollouts[0], group_advantages(rewards).advantages
    return Group(
        group_id=first.group_id,
        model=MODEL,
        lineage=LINEAGE,
        environment=first.environment,
        task_id=first.task_id,
        group_size=SIZE,
        baseline="mean",
        members=tuple(
            Member(rollout=one, reward=value, advantage=advantage, trace=None)
            for one, value, advantage in zip(rollouts, rewards, advantages, strict=True)
        ),
        cut=CUT,
    )


def plan_of(step: int, groups: Sequence[Group]) -> PackedBatch:
    """One rank, a microbatch for each group."""
    made = PackedBatch(
        model=MODEL,
        lineage=LINEAGE,
        step=step,
        base_version=step - 1,
        rank=0,
        ranks=1,
        token_budget=512,
        max_lag_versions=1_000,
        total_sequences=len(groups) * SIZE,
        total_tokens=sum(len(m.rollout.loss_mask) for group in groups for m in group.members),
        group_ids=tuple(group.group_id for group in groups),
        oldest_version=0,
        reward_mean=0.0,
        microbatches=tuple(build_microbatch(group.members) for group in groups),
        plan_digest="",
        cut=CUT,
    )
    return msgspec.structs.replace(made, plan_digest=plan_digest([made]))


def version(number: int, digest: str) -> WeightVersion:
    return msgspec.structs.replace(
        example(WeightVersion),
        model=MODEL,
        lineage=LINEAGE,
        version=number,
        step=number,
        kind="delta" if number else "anchor",
        base_version=number - 1 if number else None,
        state_digest=digest,
    )


def story() -> list[Outgoing]:
    """All that must have come of the load, as whole records."""
    events: list[Event] = [version(0, digest_of(NOTHING))]
    trained: list[Group] = []
    sums = NOTHING
    for number, kind in enumerate(kinds(LOAD)):
        group = group_of(number, kind)
        if kind in EMITTED:
            events.append(group)
        if kind == "trained":
            trained.append(group)
        fate = GroupFate(
            group_id=group.group_id,
            fate="kept" if kind == "trained" else "dropped",
            reason=FATES[kind],
            detail="",
            decided_by="pack" if kind in EMITTED else "assemble",
            fleet="fleet",
            replica="replica-0",
            members=tuple(member.rollout.rollout_id for member in group.members),
            reward_mean=None,
            group_size=SIZE,
            for_version=None,
            oldest_version=0,
            cut=CUT,
        )
        events.append(fate)
    for step in range(1, KNOWN.steps + 1):
        plan = plan_of(step, trained[(step - 1) * 10 : step * 10])
        sums = fold(sums, [plan])
        digest = digest_of(sums)
        events.append(plan)
        taken = msgspec.structs.replace(
            example(TrainStep),
            model=MODEL,
            lineage=LINEAGE,
            step=step,
            base_version=step - 1,
            version=step,
            consumed=(OffsetRange(topic="packed-batches", partition=0, start=step - 1, end=step),),
            plan_digest=plan.plan_digest,
            state_digest=digest,
        )
        events += (taken, version(step, digest))
    return [outgoing(event, source="test", time_us=AT_US) for event in events] + letters()


def digest_of(sums: Sums) -> str:
    return StateDigest.of(state_of(sums)).hex


def letters() -> list[Outgoing]:
    """The poison, refused for what it is; and the groups of versions that there never were."""
    refused: list[Outgoing] = []
    bad = [record_of(LOAD, kinds(LOAD), Planned(0, n, 0, "poison")) for n in range(len(KNOWN.letters))]
    bad = [record for record in bad if dict(record.headers)["ce_id"].decode() in KNOWN.letters]  # type: ignore[union-attr]
    for number, kind in enumerate(kinds(LOAD)):
        if kind == "future":
            bad.append(outgoing(group_of(number, kind), source="test", time_us=AT_US))
    for offset, record in enumerate(bad):
        reason = KNOWN.letters[dict(record.headers)["ce_id"].decode()]  # type: ignore[union-attr]
        seen = Record(record.topic, 0, offset, AT_US // 1000, record.key, record.value, record.headers)
        refused.append(dead_letter(seen, Refused(reason, ""), refused_by="test", time_us=AT_US))
    return refused


def both(log: Log, records: Sequence[Outgoing]) -> list[Verdict]:
    """What the reader that watches and the one afterwards say of it."""
    watcher = Watcher(log)
    try:
        writer = log.writer()
        for start in range(0, len(records), 20):
            writer.write(records[start : start + 20])
        writer.close()
        deadline = time.monotonic() + 30
        while sum(watcher.counts().values()) < len(records):
            assert time.monotonic() < deadline, f"only {watcher.counts()} came"
        seen = (watcher.drain(30.0), read_all(log))
        assert watcher.refused() >= KNOWN.letters.keys()
        return [judge(KNOWN, sightings, lineage=LINEAGE, ranks=1) for sightings in seen]
    finally:
        watcher.close()


def test_both_readers_find_a_whole_story_good(log: Log) -> None:
    for verdict in both(log, story()):
        assert verdict.findings == ()
        assert verdict.totals == verdict.expected


def test_both_readers_find_what_was_doubled_and_what_is_gone(log: Log) -> None:
    records = story()
    first = next(record for record in records if record.topic == "groups")
    lost = next(record for record in records if record.topic == "group-fates")
    kept = [record for record in records if record is not lost]
    for verdict in both(log, [*kept, first]):
        assert verdict.number("repeated") == 1
        assert verdict.number("lost") >= 1


def test_weights_are_those_of_the_plans_or_the_first_that_are_not_is_named() -> None:
    log = MemoryLog({name: spec.partitions for name, spec in TOPICS.items()})
    log.writer().write(story())
    seen = read_all(log)
    assert judge_weights(seen, lineage=LINEAGE, ranks=1) == ()
    # A trainer that took the second plan in the place of the third has other weights from version 3 on.
    plans = {s.fact.step: s for s in seen if isinstance(s.fact, PackedBatch)}
    second, third = plans[2].fact, plans[3].fact
    assert isinstance(second, PackedBatch)
    assert isinstance(third, PackedBatch)
    other = msgspec.structs.replace(third, microbatches=second.microbatches)
    swapped = [s._replace(fact=other) if s is plans[3] else s for s in seen]
    (finding,) = judge_weights(swapped, lineage=LINEAGE, ranks=1)
    assert finding.what == "wrong"
    assert "version 3" in finding.text
    (finding,) = judge_weights([s for s in seen if s is not plans[2]], lineage=LINEAGE, ranks=1)
    assert finding.what == "torn"


def test_the_load_is_opened_by_its_own_clock() -> None:
    """Ids of groups carry their opening times: the timetable and `assemble`'s deadlines speak of the same moment."""
    opened = [opened_us(group) for group in KNOWN.groups]
    assert opened[0] == LOAD.begin_us
    assert opened == sorted(opened)
