"""The ledger adds up to zero over a whole flow, and every planted loss turns it red."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from rollwire.consumers.ledger import Ledger, count_ledger
from rollwire.kernels.cost import CostModel
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import Refused
from rollwire.schemas.records import (
    Cut,
    Event,
    Feedback,
    Group,
    GroupClosed,
    GroupFate,
    LagCount,
    Member,
    Mismatch,
    OffsetRange,
    PackedBatch,
    Position,
    ProductionGroupClosed,
    Reward,
    Rollout,
    RoutingTrace,
    Segment,
    Span,
    TrainStep,
    WeightVersion,
)
from rollwire.streams import synthetic
from rollwire.streams.assemble_config import SAMPLED
from rollwire.streams.dead_letter import dead_letter
from rollwire.streams.emit import outgoing
from rollwire.streams.pack_layout import PlanFrame, lay_out
from rollwire.streams.seams.log import Outgoing, Record, TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan

LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"
NOW_US = 1_767_225_600_000_000
CUT = Cut(inputs=(), clock_us=NOW_US)


def group_id(number: int) -> str:
    opened_ms = NOW_US // 1_000 + number
    return f"{opened_ms >> 16:08x}-{opened_ms & 0xFFFF:04x}-7000-8000-{number:012x}"


def rollout(number: int, index: int) -> Rollout:
    return Rollout(
        rollout_id=f"{group_id(number)}.{index}",
        group_id=group_id(number),
        index=index,
        group_size=2,
        model="policy",
        lineage=LINEAGE,
        environment="countdown",
        task_id=f"task-{number}",
        task="{}",
        token_ids=bytes([1, 2, 3]),
        token_dtype="u1",
        segments=(Segment(kind="prompt", start=0, end=1), Segment(kind="sampled", start=1, end=3)),
        loss_mask=bytes([0, 1, 1]),
        logprobs=np.array([-0.5, -0.25], "<f4").tobytes(),
        spans=(Span(version=0, start=0, end=2),),
        finish_reason="stop",
        temperature=1.0,
        top_k_experts=1,
        fleet="fleet",
        replica="replica",
        seed=1,
        started_us=NOW_US,
        finished_us=NOW_US,
    )


def reward(number: int, index: int) -> Reward:
    return Reward(
        rollout_id=f"{group_id(number)}.{index}",
        group_id=group_id(number),
        reward=float(index),
        components=(),
        outcome="right",
        source="verifier",
        verifier="exact",
        verifier_version="1",
        evidence=(),
        scored_us=NOW_US,
    )


def trace(number: int, index: int) -> RoutingTrace:
    return RoutingTrace(
        rollout_id=f"{group_id(number)}.{index}",
        group_id=group_id(number),
        layers=(0,),
        num_experts=4,
        top_k=1,
        start_row=0,
        rows=2,
        tokens=3,
        last_row="missing",
        encoding="u1",
        data=bytes([0, 1]),
        claim=None,
        recorded_us=NOW_US,
    )


def group(number: int) -> Group:
    return Group(
        group_id=group_id(number),
        model="policy",
        lineage=LINEAGE,
        environment="countdown",
        task_id=f"task-{number}",
        group_size=2,
        baseline="mean",
        members=tuple(
            Member(
                rollout=rollout(number, i),
                reward=float(i),
                advantage=i - 0.5,
                trace=Position(topic="routing-traces", partition=0, offset=0),
            )
            for i in range(2)
        ),
        cut=CUT,
    )


def fate(number: int, by: str, reason: str) -> GroupFate:
    return GroupFate(
        group_id=group_id(number),
        fate="kept" if reason == "trained" else "dropped",
        reason=reason,
        detail="",
        decided_by=by,
        fleet="fleet",
        replica="replica",
        members=tuple(f"{group_id(number)}.{i}" for i in range(2)),
        reward_mean=0.5,
        group_size=2,
        for_version=0,
        oldest_version=0,
        cut=CUT,
    )


def closed(number: int) -> GroupClosed:
    return GroupClosed(group_id=group_id(number), fate="kept", reason="", closed_us=NOW_US)


def plan(step: int, *numbers: int) -> PackedBatch:
    frame = PlanFrame("policy", LINEAGE, step, step - 1, 1, 64, 3, CostModel(1.0, 0.0), CUT)
    return lay_out([group(n) for n in numbers], frame)[0]


def train_step(step: int, start: int) -> TrainStep:
    mismatch = Mismatch(tokens=8, mean=0.0, p50=0.0, p99=0.0, max=0.0, k1=0.0, k3=0.0)
    return TrainStep(
        model="policy",
        lineage=LINEAGE,
        step=step,
        base_version=step - 1,
        version=step,
        loss=0.1,
        grad_norm=1.0,
        entropy=1.0,
        learning_rate=1e-4,
        reward_mean=0.5,
        sequences=2,
        tokens=6,
        trained_tokens=4,
        groups=1,
        max_lag=0,
        lag_histogram=(LagCount(lag=0, tokens=4),),
        mismatch=mismatch,
        mismatch_same_version=None,
        mismatch_no_replay=None,
        routes_differing=None,
        ratio_truncated=0.0,
        tokens_per_s=1.0,
        duration_ms=1.0,
        consumed=(OffsetRange(topic="packed-batches", partition=0, start=start, end=start + 1),),
        plan_digest="0" * 64,
        state_digest="0" * 32,
        settings={},
        finished_us=NOW_US,
    )


def version(number: int) -> WeightVersion:
    return synthetic.version(number, lineage=LINEAGE, at_us=NOW_US)


def record(event: Event) -> Outgoing:
    return outgoing(event, source="test", time_us=NOW_US)


def flow() -> list[Outgoing]:
    """Groups 0 and 1 are trained on in steps 1 and 2, 2 is stale, 3 incomplete, 4 waits; one rollout is poison."""
    made: list[Event] = [version(0)]
    for number in range(5):
        for index in range(2):
            made += [rollout(number, index), reward(number, index), trace(number, index)]
    made += [reward(0, 0)]  # a verifier that started again: a repeat
    made += [
        group(0),
        group(1),
        group(2),
        closed(0),
        closed(1),
        closed(2),
        closed(3),
        fate(3, "assemble", "incomplete"),
    ]
    made += [
        plan(1, 0),
        fate(0, "pack", "trained"),
        plan(2, 1),
        fate(1, "pack", "trained"),
        fate(2, "pack", "stale"),
    ]
    made += [train_step(1, 0), version(1), train_step(2, 1), version(2)]
    poison = Outgoing("rollouts", b"key", b"no event", (), 0)
    return [*(record(event) for event in made), poison]


def live_group(number: int) -> Group:
    answer = synthetic.answer(group_id(number), at_us=NOW_US)
    plain = Rollout(**{name: getattr(answer, name) for name in Rollout.__struct_fields__})
    return msgspec.structs.replace(
        group(number),
        lineage=answer.lineage,
        environment=answer.environment,
        task_id=answer.task_id,
        group_size=1,
        baseline="cohort",
        members=(Member(rollout=plain, reward=1.0, advantage=None, trace=None, signals=1),),
    )


def feedback(number: int) -> Feedback:
    return Feedback(
        feedback_id=f"f{number}",
        id_source="client",
        tenant="acme",
        group_id=group_id(number),
        rollout_id=f"{group_id(number)}.0",
        signal="thumb",
        value=1.0,
        label=None,
        happened_us=NOW_US,
        received_us=NOW_US,
        subject="",
        comment=None,
        seal=None,
        dialect="rollwire",
        key_id="",
    )


def live_flow() -> list[Outgoing]:
    """Beside the others: answer 10 is crowded out by pack, 11 was never judged, 12 waits for its reward."""
    made: list[Event] = []
    for number in (10, 11, 12):
        made += [synthetic.answer(group_id(number), at_us=NOW_US), feedback(number)]
    made += [synthetic.said(group_id(10), 1.0, at_us=NOW_US), live_group(10)]
    ended = fate(11, "assemble-production", "incomplete")
    crowded = fate(10, "pack", "crowded_out")
    made += [
        ProductionGroupClosed(group_id=group_id(n), fate="kept", reason="", closed_us=NOW_US)
        for n in (10, 11)
    ]
    made += [
        msgspec.structs.replace(one, members=(f"{one.group_id}.0",), group_size=1) for one in (ended, crowded)
    ]
    return [*flow(), *(record(event) for event in made)]


def write(records: list[Outgoing]) -> MemoryLog:
    """One partition a topic where it helps to know positions; everything written so far is committed, but group 4."""
    log = MemoryLog(dict.fromkeys(TOPICS, 1))
    writer = log.writer()
    writer.write([r._replace(partition=0) for r in records])
    refused = next((r for r in scan(log, ["rollouts"]) if r.value == b"no event"), None)
    if refused is not None:
        letter = dead_letter(refused, Refused("not_framed", ""), refused_by="assemble", time_us=NOW_US)
        writer.write([letter._replace(partition=0)])
    return log


def commit(log: MemoryLog) -> None:
    """Everything is committed but what belongs to group 4."""
    for topic in SAMPLED.joined:
        pending = [r.offset for r in scan(log, [topic]) if r.key == group_id(4).encode()]
        log.set_committed("t.assemble", TopicPartition(topic, 0), min(pending))
    for topic, end in (("production-rollouts", 2), ("rewards", 99)):
        log.set_committed("t.assemble-production", TopicPartition(topic, 0), end)
    for group_name, topic in (("t.pack", "groups"), ("t.trainer", "packed-batches")):
        partition = TopicPartition(topic, 0)
        log.set_committed(group_name, partition, log.end_offsets([partition])[partition])


def counted(records: list[Outgoing]) -> Ledger:
    log = write(records)
    commit(log)
    return count_ledger(log, "t.", settle_s=0.0)


def test_a_whole_flow_adds_up() -> None:
    ledger = counted(_reordered(flow()))
    assert {line.topic: line.missing_ids + line.extra_ids for line in ledger.lines if line.gap} == {}
    assert ledger.gap == 0
    assert [line.topic for line in ledger.lines] == sorted(TOPICS)
    rollouts = ledger["rollouts"]
    assert (rollouts.received, rollouts.accepted, rollouts.refused, rollouts.shed, rollouts.pending) == (
        11,
        6,
        1,
        2,
        2,
    )
    assert ledger["rewards"].accepted == 7
    assert (ledger["groups"].accepted, ledger["groups"].shed) == (2, 1)


def test_a_plan_that_a_revert_passes_over_is_shed() -> None:
    went_back = msgspec.structs.replace(version(2), kind="revert", reverts_to=0)
    idle = msgspec.structs.replace(train_step(2, 1), groups=0)
    reverted = [*flow()[:-3], record(idle), record(went_back), flow()[-1]]
    ledger = counted(_reordered(reverted))
    assert {line.topic: line.missing_ids + line.extra_ids for line in ledger.lines if line.gap} == {}
    batches = ledger["packed-batches"]
    assert (batches.received, batches.accepted, batches.shed) == (2, 1, 1)
    # A plan that knew of the revert has to be trained.
    later = msgspec.structs.replace(plan(3, 0), newest_revert=2, group_ids=())
    ledger = counted(_reordered([*reverted, record(later)]))
    assert ledger["packed-batches"].gap == 1


def _reordered(records: list[Outgoing]) -> list[Outgoing]:
    """The events of group 4 last, since they lie above the committed offsets."""
    return sorted(records, key=lambda r: r.topic in SAMPLED.joined and r.key == group_id(4).encode())


def test_live_traffic_adds_up_by_readers_of_its_own() -> None:
    ledger = counted(_reordered(live_flow()))
    assert {line.topic: line.missing_ids + line.extra_ids for line in ledger.lines if line.gap} == {}
    answers, said = ledger["production-rollouts"], ledger["user-feedback"]
    assert (answers.received, answers.accepted, answers.shed, answers.pending) == (3, 1, 1, 1)
    assert (said.received, said.accepted, said.shed, said.pending) == (3, 1, 1, 1)
    assert ledger["rewards"].accepted == 8
    assert ledger["production-groups-closed"].accepted == 2


@pytest.mark.parametrize(
    ("topic", "number", "gap"),
    [
        ("group-fates", -2, "production-rollouts"),  # of the answer that nobody judged
        ("groups", -1, "production-groups-closed"),
        ("production-rollouts", 0, "groups"),
        ("group-fates", -1, "groups"),
    ],
)
def test_planted_losses_of_live_traffic_turn_it_red(topic: str, number: int, gap: str) -> None:
    ledger = counted(_reordered(_without(topic, number)(live_flow())))
    assert ledger[gap].gap > 0


def test_a_reward_of_what_people_said_is_not_decided_by_what_the_other_reader_committed() -> None:
    log = write([record(synthetic.said(group_id(1), 1.0, at_us=NOW_US))])
    log.set_committed("t.assemble", TopicPartition("rewards", 0), 1)
    assert count_ledger(log, "t.", settle_s=0.0)["rewards"].pending == 1
    log.set_committed("t.assemble-production", TopicPartition("rewards", 0), 1)
    assert count_ledger(log, "t.", settle_s=0.0)["rewards"].gap == 1


def _without(topic: str, number: int) -> Callable[[list[Outgoing]], list[Outgoing]]:
    """The nth record of a topic never arrived."""

    def lose(records: list[Outgoing]) -> list[Outgoing]:
        found = [r for r in records if r.topic == topic]
        return [r for r in records if r is not found[number]]

    return lose


def _smaller_group(records: list[Outgoing]) -> list[Outgoing]:
    """assemble forgot a member although the group says that it is whole."""
    one = group(0)
    lone = msgspec.structs.replace(one, members=one.members[:1], group_size=1)
    rest = tuple(
        msgspec.structs.replace(m, rollout=msgspec.structs.replace(m.rollout, group_size=1))
        for m in lone.members
    )
    changed = record(msgspec.structs.replace(lone, members=rest))
    fated = record(msgspec.structs.replace(fate(0, "pack", "trained"), members=(rest[0].rollout.rollout_id,)))
    return [
        changed
        if r.topic == "groups" and r.key == changed.key
        else fated
        if r.topic == "group-fates" and r.key == changed.key
        else r
        for r in records
    ]


@pytest.mark.parametrize(
    ("damage", "topic"),
    [
        pytest.param(_without("groups", 0), "groups-closed", id="a group was lost"),
        pytest.param(_without("group-fates", 0), "rollouts", id="assemble's fate was lost"),
        pytest.param(_without("group-fates", 1), "groups", id="pack's fate was lost"),
        pytest.param(_without("packed-batches", 1), "group-fates", id="a plan was lost"),
        pytest.param(_without("train-steps", 0), "packed-batches", id="a step was lost"),
        pytest.param(_without("train-steps", 1), "weight-versions", id="a version without a step"),
        pytest.param(_without("weight-versions", 1), "weight-versions", id="a hole in the versions"),
        pytest.param(_without("weight-versions", 2), "train-steps", id="a step without a version"),
        pytest.param(_without("rollouts", 0), "groups", id="a member of no rollout"),
        pytest.param(_smaller_group, "rollouts", id="a forgotten rollout"),
        pytest.param(_smaller_group, "rewards", id="a forgotten reward"),
        pytest.param(_smaller_group, "routing-traces", id="a forgotten trace"),
        pytest.param(lambda r: [*r, record(fate(1, "pack", "trained"))], "group-fates", id="two fates"),
        pytest.param(lambda r: [*r, record(plan(2, 1))], "packed-batches", id="two plans for a step"),
        pytest.param(lambda r: [*r, record(plan(3, 1))], "packed-batches", id="a group trained on twice"),
        pytest.param(lambda r: [*r, record(version(2))], "weight-versions", id="a version twice"),
        pytest.param(lambda r: [*r, record(train_step(2, 1))], "train-steps", id="a step twice"),
        pytest.param(
            lambda r: [*r, Outgoing("fleet-status", b"k", b"junk", (), 0)],
            "fleet-status",
            id="poison nobody refused",
        ),
        pytest.param(
            lambda r: [
                *r,
                dead_letter(
                    Record("groups", 0, 77, 0, b"k", b"v", ()),
                    Refused("malformed", ""),
                    refused_by="pack",
                    time_us=NOW_US,
                ),
            ],
            "dead-letters",
            id="a refusal of no record",
        ),
    ],
)
def test_planted_losses_turn_it_red(damage: Callable[[list[Outgoing]], list[Outgoing]], topic: str) -> None:
    ledger = counted(_reordered(damage(flow())))
    assert ledger.gap > 0
    line = ledger[topic]
    assert line.gap > 0
    assert line.missing_ids or line.extra_ids


def test_without_committed_offsets_everything_is_pending() -> None:
    log = write([record(rollout(0, 0)), record(reward(0, 0))])
    ledger = count_ledger(log, "t.", settle_s=0.0)
    assert ledger.gap == 0
    assert ledger["rollouts"].pending == 1
    # The same records below the offset are lost.
    log.set_committed("t.assemble", TopicPartition("rollouts", 0), 1)
    ledger = count_ledger(log, "t.", settle_s=0.0)
    assert ledger.gap == 1
    assert ledger["rollouts"].missing_ids == (f"{group_id(0)}.0 at rollouts[0]:0",)
