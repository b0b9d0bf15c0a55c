"""Lineage of what people said and of their own traffic: to the versions and fleets, also when they were erased since."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
import pytest

from rollwire.consumers.audit.lineage import Answer
from rollwire.consumers.audit.lineage_trace import CONFIRMED_STEPS, Tracer
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.golden import example
from rollwire.schemas.ids import new_group_id
from rollwire.schemas.pseudonyms import pseudonym_of
from rollwire.schemas.records import (
    Cut,
    DeadLetter,
    Erasure,
    Event,
    Feedback,
    FleetStatus,
    GroupFate,
    Position,
    ProductionRollout,
    Reward,
    TrainStep,
    WeightVersion,
)
from rollwire.streams.emit import outgoing
from rollwire.streams.findings import Kind
from rollwire.streams.seams.keys_memory import MemoryKeys
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.sealing import seal_field

ADA, BOB = pseudonym_of(bytes(32), "acme", "ada"), pseudonym_of(bytes(32), "acme", "bob")
START_US = 1_767_225_600_000_000
NEWEST = 7


def group(n: int) -> str:
    return new_group_id(START_US + n * 1_000_000, n)


def answered(keys: MemoryKeys, person: str, n: int) -> ProductionRollout:
    made = example(ProductionRollout, "sealed")
    name = f"{group(n)}.0"
    tokens = np.arange(len(made.loss_mask), dtype="<u4").tobytes()
    held, seal = seal_field(keys, person, name, "token_ids", tokens)
    return msgspec.structs.replace(made, rollout_id=name, group_id=group(n), token_ids=held, sealed=seal)


def said(keys: MemoryKeys, person: str, n: int) -> Feedback:
    made = example(Feedback, "sealed-comment")
    name = f"f-{n}-{person[:4]}"
    held, seal = seal_field(keys, person, name, "comment", b"thanks")
    return msgspec.structs.replace(
        made,
        feedback_id=name,
        rollout_id=f"{group(n)}.0",
        group_id=group(n),
        subject=person,
        comment=held,
        seal=seal,
    )


def rewarded(n: int, evidence: tuple[str, ...]) -> Reward:
    made = example(Reward)
    return msgspec.structs.replace(
        made, rollout_id=f"{group(n)}.0", group_id=group(n), source="user", evidence=evidence
    )


def decided(n: int, base: int, *, seen: int) -> GroupFate:
    """`seen`: the next offset of weight-versions that pack had read."""
    made = example(GroupFate, "trained")
    return msgspec.structs.replace(
        made,
        group_id=group(n),
        members=(f"{group(n)}.0",),
        for_version=base,
        group_size=1,
        cut=Cut(inputs=(Position(topic="weight-versions", partition=0, offset=seen),), clock_us=START_US),
    )


def published(lineage: str, number: int, to: int | None) -> list[Event]:
    version = example(WeightVersion)
    step = example(TrainStep)
    digest = hashlib.sha256(str(number if to is None else to).encode()).hexdigest()
    events: list[Event] = [
        msgspec.structs.replace(
            version,
            lineage=lineage,
            version=number,
            kind="anchor" if number == 0 else "delta" if to is None else "revert",
            base_version=None if number == 0 else number - 1,
            step=number,
            state_digest=digest,
            reverts_to=to,
        )
    ]
    if number:
        events.append(
            msgspec.structs.replace(
                step,
                lineage=lineage,
                step=number,
                version=number,
                base_version=number - 1,
                state_digest=digest,
                consumed=(),
                settings={} if to is None else {"revert_to": str(to)},
            )
        )
    return events


@pytest.fixture
def log() -> MemoryLog:
    """Ada's answers 1 and 2, Bob's 3 and 4. Ada says something about 1 and 3, Bob about 3. 1 is trained into version 2, 3 into
    6, and 4 was planned for 5 before anybody knew that version 4 goes back to 1: it never was trained on."""
    keys = MemoryKeys()
    made = MemoryLog({name: spec.partitions for name, spec in TOPICS.items()})
    rollouts = [
        answered(keys, ADA, 1),
        answered(keys, ADA, 2),
        answered(keys, BOB, 3),
        answered(keys, BOB, 4),
    ]
    events: list[Event] = [
        *rollouts,
        said(keys, ADA, 1),
        said(keys, ADA, 3),
        said(keys, BOB, 3),
        rewarded(1, (f"f-1-{ADA[:4]}",)),
        rewarded(3, (f"f-3-{ADA[:4]}", f"f-3-{BOB[:4]}")),
        decided(1, 1, seen=2),
        decided(3, 5, seen=6),
        decided(4, 4, seen=4),
    ]
    for number in range(NEWEST + 1):
        events += published(rollouts[0].lineage, number, 1 if number == 4 else None)
    status = example(FleetStatus, "channel-swapped")
    for replica, number, served in (("old", 3, 3), ("between", 5, 5), ("new", 7, 7)):
        digest = hashlib.sha256(str(served).encode()).hexdigest()
        events.append(msgspec.structs.replace(status, replica=replica, version=number, state_digest=digest))
    write(made, *events)
    return made


def write(log: MemoryLog, *events: Event) -> None:
    log.writer().write([outgoing(event, source="test", time_us=START_US) for event in events])


def trained(answer: Answer) -> list[tuple[int, ...]]:
    return [one.trained for one in answer.reached]


def test_what_a_person_reached(log: MemoryLog) -> None:
    answer = Tracer(log, None).person(ADA)
    assert answer.report.findings == ()
    assert trained(answer) == [(2, 6)]
    (reached,) = answer.reached
    assert (reached.carried, reached.left, reached.newest) == ((2, 3, 6, 7), ((4, 1),), NEWEST)
    assert [(one.replica, one.version) for one in answer.served] == [("new", 7), ("old", 3)]
    assert [one.group_id for one in answer.groups] == [group(1), group(2), group(3)]
    assert {one.rollout_id: one.subject for one in answer.rollouts} == {
        f"{group(1)}.0": ADA,
        f"{group(2)}.0": ADA,
        f"{group(3)}.0": BOB,
    }
    assert not any(one.erased for one in answer.rollouts)


def test_a_plan_that_a_revert_passed_over_trained_on_nothing(log: MemoryLog) -> None:
    answer = Tracer(log, None).rollout(f"{group(4)}.0")
    (line,) = answer.groups
    assert (line.fate, line.planned, line.made) == ("kept", None, None)
    assert [len(one) for one in (answer.reached, answer.served, answer.steps)] == [0, 0, 0]


@pytest.mark.parametrize("name", [f"f-3-{BOB[:4]}", f"acme/f-3-{BOB[:4]}"])
def test_where_a_click_went(log: MemoryLog, name: str) -> None:
    answer = Tracer(log, None).feedback(name)
    assert answer.report.findings == ()
    assert answer.focus == (f"f-3-{BOB[:4]}",)
    assert trained(answer) == [(6,)]
    (one,) = answer.rollouts
    assert {line.feedback_id for line in one.feedback} == {f"f-3-{ADA[:4]}", f"f-3-{BOB[:4]}"}
    assert set(one.rewards[0].evidence) == {line.feedback_id for line in one.feedback}


def test_the_feedback_of_another_tenant_is_not_meant(log: MemoryLog) -> None:
    answer = Tracer(log, None).feedback(f"other/f-3-{BOB[:4]}")
    assert [one.kind for one in answer.report.findings] == [Kind.EVENT_UNKNOWN]


def test_what_is_erased_is_said_and_is_no_fault(log: MemoryLog) -> None:
    erasure = Erasure(subject=ADA, request_id="r-1", generations=1, reason="", by="ann", erased_us=START_US)
    write(log, erasure)
    answer = Tracer(log, None).person(ADA)
    assert answer.report.exit_code == 0
    assert {one.subject for one in answer.rollouts if one.erased} == {ADA}
    assert sum(note.startswith("erased") for note in answer.report.notes) == 2
    of_version = Tracer(log, None).version(2)
    assert [one.erased for one in of_version.rollouts] == [True]
    assert any("of a person whose keys were destroyed" in note for note in of_version.report.notes)


def test_feedback_that_a_reward_names_and_that_is_gone_is_a_gap(log: MemoryLog) -> None:
    write(log, rewarded(2, ("f-9",)))
    answer = Tracer(log, None).rollout(f"{group(2)}.0")
    assert [(one.kind, one.where) for one in answer.report.findings] == [
        (Kind.HISTORY_GAP, "user-feedback, 1 event")
    ]
    assert "f-9" in answer.report.findings[0].detail


def test_a_rollout_that_was_refused_says_by_whom_and_why(log: MemoryLog) -> None:
    (before,) = Tracer(log, None).rollout(f"{group(2)}.0").rollouts
    letter = example(DeadLetter)
    write(
        log,
        msgspec.structs.replace(
            letter, source=before.at, value=f"{group(2)}.0".encode(), refused_by="assemble-production"
        ),
    )
    answer = Tracer(log, None).rollout(f"{group(2)}.0")
    assert answer.report.exit_code == 0
    (note,) = answer.report.notes
    assert note.startswith(f"assemble-production refused production-rollouts[{before.at.partition}]")
    assert letter.reason in note


def test_many_steps_are_known_by_the_fates(log: MemoryLog) -> None:
    keys, lineage = MemoryKeys(), example(ProductionRollout, "sealed").lineage
    count = CONFIRMED_STEPS + 5
    events: list[Event] = []
    for number in range(NEWEST + 1, NEWEST + 1 + count):
        events += [
            *published(lineage, number, None),
            answered(keys, ADA, 100 + number),
            rewarded(100 + number, ()),
        ]
        events.append(decided(100 + number, number - 1, seen=10_000))
    write(log, *events)
    answer = Tracer(log, None).person(ADA)
    assert len(answer.steps) == count + 2
    assert answer.reached[0].newest == NEWEST + count
    assert any("were not read" in note for note in answer.report.notes)
