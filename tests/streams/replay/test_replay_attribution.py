"""Attribution run again: as it was, with other rules, and into the join behind it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec
import pytest

from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import ConfigError
from rollwire.schemas.golden import example
from rollwire.schemas.ids import new_group_id
from rollwire.schemas.records import Event, Feedback, Group, ProductionRollout, Reward
from rollwire.schemas.rules import Rules, parse_rules
from rollwire.streams.assemble_config import ProductionConfig
from rollwire.streams.attribution.replay import attributed
from rollwire.streams.attribution.rulebook import rules_notice
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.findings import Kind
from rollwire.streams.replay.audit import ATTRIBUTE, audit_replay
from rollwire.streams.replay.diff import compare, outcomes
from rollwire.streams.replay.settings import Spoken
from rollwire.streams.replay.shares import Logs
from rollwire.streams.replay.whatif import Replayed, planned_whatif, replay
from rollwire.streams.replay.window import Window
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.settings_notice import told_of

RULES: Final = """
name = "short"
version = "1"
window_s = 20
grace_s = 5
horizon_s = 60
max_events = 3
reward = [-1.0, 1.0]
[signals.thumb]
kind = "number"
range = [-1.0, 1.0]
values = [-1.0, 1.0]
fold = "last"
worth = [-1.0, 1.0]
weight = 1.0
"""
OTHER: Final = RULES.replace('"short"', '"reversed"').replace("worth = [-1.0, 1.0]", "worth = [1.0, -1.0]")
SPOKEN: Final = Spoken(
    [
        (
            told_of(
                "assemble-production",
                {"production": ProductionConfig(group_deadline_s=120.0)},
                lineage="line",
                code="",
                at_us=0,
            ),
            "policy",
        )
    ]
)


@pytest.fixture(scope="module")
def history() -> MemoryLog:
    """Answers and thumbs, some late, some twice, some about answers that never come."""
    clock, rng = ManualClock(), random.Random(1)
    counts = {name: 2 if spec.partitions > 1 else 1 for name, spec in TOPICS.items()}
    log = MemoryLog(counts, clock)
    writer = log.writer()

    def write(event: Event) -> None:
        writer.write([outgoing(event, source="rollwire/test", time_us=clock.now_us())])

    write(rules_notice(RULES, "policy", clock.now_us()))
    answer, thumb = example(ProductionRollout, "sealed"), example(Feedback, "thumb")
    assert isinstance(answer, ProductionRollout)
    assert isinstance(thumb, Feedback)
    for number in range(40):
        group = new_group_id(clock.now_us(), number)
        rollout = f"{group}.0"
        if rng.random() < 0.9:
            write(msgspec.structs.replace(answer, group_id=group, rollout_id=rollout))
        for event in range(rng.choice((0, 0, 1, 1, 2, 5))):
            clock.advance(rng.choice((0.1, 1.0, 12.0)))
            value = rng.choice((-1.0, 1.0))
            said = msgspec.structs.replace(
                thumb,
                feedback_id=f"{number}-{event if rng.random() < 0.9 else 0}",
                rollout_id=rollout,
                group_id=group,
                value=value,
                label=None,
                happened_us=clock.now_us(),
            )
            write(said)
        clock.advance(rng.choice((0.5, 3.0)))
    clock.advance(100.0)
    write(
        msgspec.structs.replace(
            answer, group_id=(last := new_group_id(clock.now_us(), 99)), rollout_id=f"{last}.0"
        )
    )
    for reward in attributed(log).rewards.values():
        if not reward.rollout_id.startswith(last):
            write(reward)
    return log


def run(history: MemoryLog, *processors: str, rules: Rules | None = None) -> tuple[Replayed, MemoryLog]:
    shadow = MemoryLog({name: history.partitions(name) for name in TOPICS})

    @contextmanager
    def logs() -> Iterator[Logs]:
        yield Logs(history, shadow)

    to_us = max(record.timestamp_ms for record in scan(history, ["production-rollouts"])) * 1_000
    what = planned_whatif(processors, SPOKEN, Window(to_us=to_us), rules=rules)
    return replay(what, logs), shadow


def rewards(log: MemoryLog) -> dict[str, Reward]:
    events = [decode_record(record) for record in scan(log, ["rewards"])]
    return {event.rollout_id: event for event in events if isinstance(event, Reward)}


def test_the_same_rules_give_the_same_rewards_and_refusals(history: MemoryLog) -> None:
    done, shadow = run(history, ATTRIBUTE)
    assert rewards(shadow) == rewards(history)
    assert len(rewards(history)) > 20
    refused = {record.key for record in scan(shadow, ["dead-letters"])}
    assert refused == {b"user-feedback"}
    assert done.written["dead-letters"] == len(attributed(history).letters)
    assert run(history, ATTRIBUTE)[0] == done


def test_other_rules_are_seen_in_the_diff_and_in_the_groups_behind(history: MemoryLog) -> None:
    processors = (ATTRIBUTE, "assemble-production")
    _, same = run(history, *processors)
    _, other = run(history, *processors, rules=parse_rules(OTHER))
    diff = compare(outcomes(same), outcomes(other))
    assert not diff.equal
    scored = [r for r in rewards(same).values() if r.reward]
    assert {moved.id for moved in diff.rescored} == {r.rollout_id for r in scored}
    assert diff.reward_mean_a == pytest.approx(-(diff.reward_mean_b or 0.0))
    for log, sign in ((same, 1.0), (other, -1.0)):
        groups = [decode_record(record) for record in scan(log, ["groups"])]
        assert groups
        for group in groups:
            assert isinstance(group, Group)
            reward = rewards(same)[group.members[0].rollout.rollout_id].reward
            assert group.members[0].reward == (None if reward is None else pytest.approx(sign * reward))
    with pytest.raises(ConfigError, match="attribute"):
        planned_whatif(["assemble-production"], SPOKEN, Window(), rules=parse_rules(OTHER))


def test_an_audit_folds_every_reward_again(history: MemoryLog) -> None:
    clean = audit_replay(history, [ATTRIBUTE], Spoken([]))
    assert clean.findings == ()
    assert clean.checked["rewards"] == len(rewards(history))
    changed = MemoryLog({name: history.partitions(name) for name in TOPICS})
    victim = min(rewards(history))
    for place, at in history._partitions.items():
        changed._at(place).entries = list(at.entries)
    record = next(
        r
        for r in scan(history, ["rewards"])
        if (e := decode_record(r)) and getattr(e, "rollout_id", "") == victim
    )
    event = decode_record(record)
    assert isinstance(event, Reward)
    bad = outgoing(
        msgspec.structs.replace(event, reward=0.125), source="rollwire/test", time_us=event.scored_us
    )
    entries = next(at for place, at in changed._partitions.items() if place == record[:2]).entries
    entries[record.offset] = record._replace(value=bad.value)
    found = audit_replay(changed, [ATTRIBUTE], Spoken([])).findings
    assert [(f.kind, f.position and f.position.offset) for f in found] == [
        (Kind.OUTCOME_DIFFERS, record.offset)
    ]
    assert victim in found[0].detail
