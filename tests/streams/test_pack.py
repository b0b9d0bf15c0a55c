"""The pure pack machine: C03, C06, C13, C15, and the laws over arbitrary arrivals, versions and restarts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.schemas.errors import PlanViolation, Refused
from rollwire.schemas.records import (
    Event,
    Group,
    GroupFate,
    PackedBatch,
    WeightVersion,
)
from rollwire.streams import synthetic
from rollwire.streams.pack import Decision, PackConfig, Packer, Refusal
from rollwire.streams.seams.log import Record

LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"
OTHER = "0197a1b2-0000-7000-8000-0000000000bb"


class MakeGroup(Protocol):
    def __call__(
        self,
        number: int,
        versions: Sequence[int] = (0,),
        *,
        rewards: Sequence[float | None] = (1.0, 0.0),
        lengths: Sequence[int] | None = None,
        lineage: str = LINEAGE,
        model: str = "policy",
    ) -> Group: ...


def version_event(version: int, lineage: str = LINEAGE) -> WeightVersion:
    return synthetic.version(version, lineage=lineage, at_us=0)


def record_of(partition: int, offset: int, timestamp_ms: int = 0) -> Record:
    return Record("groups", partition, offset, timestamp_ms, b"key", b"raw bytes", (("ce_id", b"x"),))


class Bench:
    """A Packer with two partitions of `groups`, and the log that a restart would find."""

    def __init__(self, config: PackConfig, latest_version: int = 0, next_step: int = 1) -> None:
        self.config = config
        self.latest = -1
        self.first_step = next_step
        self.log: dict[int, list[tuple[Record, Group | Refused]]] = {0: [], 1: []}
        self.committed = {0: 0, 1: 0}
        self.events: list[Event] = []
        self.refusals: list[Refusal] = []
        self.packer = Packer(
            config, model="policy", lineage=LINEAGE, next_step=next_step, positions=self.committed
        )
        for version in range(latest_version + 1):
            self.publish(version)

    def publish(self, version: int) -> None:
        self.latest = version
        self.packer.learn(version_event(version), version)

    def arrive(self, partition: int, event: Group | Refused, timestamp_ms: int = 0) -> None:
        # Offsets have holes, as control records leave them.
        record = record_of(partition, 2 * len(self.log[partition]), timestamp_ms)
        self.log[partition].append((record, event))
        self.packer.receive(record, event)

    def decide(self) -> list[Event]:
        found: list[Event] = []
        while (decision := self._decision()).changed:
            found += decision.events
            self.refusals += decision.refusals
            self.committed = decision.positions
        self.events += found
        return found

    def _decision(self) -> Decision:
        decision = self.packer.decide(123, caught_up=False)
        return self.packer.decide(123, caught_up=True) if decision.catch_up else decision

    def restart(self, *, read: bool = True) -> None:
        """A new life from positions, fates and plans alone."""
        fates = [e for e in self.events if isinstance(e, GroupFate)]
        below = {0: 0, 1: 0}
        for fate in fates:
            for at in fate.cut.inputs:
                if at.topic == "groups":
                    below[at.partition] = max(below[at.partition], at.offset)
        steps = [e.step for e in self.events if isinstance(e, PackedBatch)]
        self.packer = Packer(
            self.config,
            model="policy",
            lineage=LINEAGE,
            next_step=max(steps, default=self.first_step - 1) + 1,
            positions=self.committed,
            decided=[fate.group_id for fate in fates],
            decided_below=below,
        )
        for version in range(self.latest + 1):
            self.packer.learn(version_event(version), version)
        if read:
            for partition, records in self.log.items():
                for record, event in records:
                    if record.offset >= self.committed[partition]:
                        self.packer.receive(record, event)

    @property
    def fates(self) -> dict[str, str]:
        return {e.group_id: e.reason for e in self.events if isinstance(e, GroupFate)}


def test_c03_staleness_is_judged_at_the_version_of_use(make_group: MakeGroup) -> None:
    bench = Bench(
        PackConfig(groups_per_step=3, max_lag_versions=2, max_steps_ahead=0), latest_version=10, next_step=11
    )
    groups = {version: make_group(version, (version,)) for version in (7, 8, 10, 11)}
    for version, group in groups.items():
        bench.arrive(version % 2, group)
    bench.decide()
    reasons = {version: bench.fates.get(group.group_id) for version, group in groups.items()}
    assert reasons == {7: "stale", 8: None, 10: None, 11: "version_future"}
    stale = next(e for e in bench.events if isinstance(e, GroupFate) and e.reason == "stale")
    assert "3 policy versions" in stale.detail
    assert "max_lag_versions 2" in stale.detail
    assert (stale.for_version, stale.oldest_version, stale.fleet, stale.replica) == (
        10,
        7,
        "fleet",
        "replica-1",
    )
    [(record, refused)] = bench.refusals
    assert (refused.reason, record.value) == ("version_future", b"raw bytes")
    # Three newer groups make step 11; the buffered v8 came first and is in it, at lag 2 exactly.
    bench.arrive(0, make_group(20, (10,)))
    bench.decide()
    assert bench.fates[groups[8].group_id] == "trained"


def test_c03_a_buffered_group_is_judged_again_when_it_is_drained(make_group: MakeGroup) -> None:
    bench = Bench(
        PackConfig(groups_per_step=2, max_lag_versions=2, max_steps_ahead=0), latest_version=10, next_step=11
    )
    held = make_group(1, (8,))
    bench.arrive(0, make_group(2, (10,)), timestamp_ms=1)
    bench.arrive(1, make_group(3, (10,)), timestamp_ms=2)
    bench.arrive(1, held, timestamp_ms=3)
    events = bench.decide()
    # Step 11 was planned without it; for step 12 it is one version too old, and its slot comes back at once.
    assert [e.step for e in events if isinstance(e, PackedBatch)] == [11]
    assert bench.fates[held.group_id] == "stale"


def test_c02_the_oldest_span_of_any_member_counts(make_group: MakeGroup) -> None:
    bench = Bench(
        PackConfig(groups_per_step=1, max_lag_versions=1, max_steps_ahead=0), latest_version=5, next_step=6
    )
    mixed = make_group(1, (5, 3))
    bench.arrive(0, mixed)
    bench.decide()
    assert bench.fates == {mixed.group_id: "stale"}


def test_c06_drops_give_their_slots_back_while_the_plan_waits(make_group: MakeGroup) -> None:
    bench = Bench(
        PackConfig(groups_per_step=2, max_lag_versions=0, max_steps_ahead=0), latest_version=3, next_step=4
    )
    waiting = make_group(1, (3,))
    bench.arrive(0, waiting)
    for number in (2, 3):
        bench.arrive(0, make_group(number, (1,)))
    dropped = [e for e in bench.decide() if isinstance(e, GroupFate)]
    assert [e.reason for e in dropped] == ["stale", "stale"]
    assert bench.committed == {0: 0, 1: 0}  # the waiting group is not below the position
    assert bench.packer.decided_above
    bench.restart()
    assert bench.decide() == []  # no second fate for the drops
    assert bench.packer.decided_above
    bench.arrive(1, make_group(4, (3,)))
    bench.decide()
    assert bench.committed == {0: 5, 1: 1}
    assert not bench.packer.decided_above
    assert Counter(bench.fates.values()) == {"stale": 2, "trained": 2}


def test_drops_of_an_earlier_life_count_until_reading_has_come_by(make_group: MakeGroup) -> None:
    bench = Bench(PackConfig(groups_per_step=2, max_lag_versions=0), latest_version=3, next_step=4)
    bench.arrive(0, make_group(1, (3,)))
    bench.arrive(0, make_group(2, (1,)))
    bench.decide()
    bench.restart(read=False)
    bench.packer.receive(*bench.log[0][0])
    assert bench.packer.decided_above
    bench.packer.receive(*bench.log[0][1])
    bench.packer.decide(0, caught_up=True)
    assert bench.packer.decided_above  # the drop itself is above the position now


@pytest.mark.parametrize(
    ("length", "reason"), [(21, "over_budget"), (20, "trained"), (0, "sequence_empty"), (2, "trained")]
)
def test_c13_one_sequence_decides_for_its_group(make_group: MakeGroup, length: int, reason: str) -> None:
    bench = Bench(PackConfig(groups_per_step=1, token_budget=20))
    group = make_group(1, (0,), lengths=(length, 5))
    bench.arrive(0, group)
    good = make_group(2)
    bench.arrive(0, good)
    bench.decide()
    assert bench.fates == {group.group_id: reason, good.group_id: "trained"}


def test_another_lineage_and_another_model_are_quarantined(make_group: MakeGroup) -> None:
    bench = Bench(PackConfig(groups_per_step=1))
    bench.arrive(0, make_group(1, lineage=OTHER))
    bench.arrive(1, make_group(2, model="other"))
    bench.decide()
    assert list(bench.fates.values()) == ["lineage_abandoned"] * 2
    assert [r.refused.reason for r in bench.refusals] == ["lineage_abandoned"] * 2


def test_unscored_members_are_not_trained_on(make_group: MakeGroup) -> None:
    bench = Bench(PackConfig(groups_per_step=1))
    bench.arrive(0, make_group(1, rewards=(1.0, None, 0.0)))
    nobody = make_group(2, rewards=(None, None))
    bench.arrive(0, nobody)
    [batch] = [e for e in bench.decide() if isinstance(e, PackedBatch)]
    assert (batch.total_sequences, batch.reward_mean) == (2, 0.5)
    assert bench.fates[nobody.group_id] == "unscorable"


def test_c44_a_poison_record_is_refused_once_and_stops_nobody(make_group: MakeGroup) -> None:
    bench = Bench(PackConfig(groups_per_step=2, max_lag_versions=0))
    bench.arrive(0, make_group(1))
    bench.arrive(0, Refused("malformed", "not a group"))
    bench.decide()
    bench.restart()
    bench.arrive(1, make_group(2))
    bench.decide()
    assert [(r.refused.reason, r.record.offset) for r in bench.refusals] == [("malformed", 2)]
    assert list(bench.fates.values()) == ["trained", "trained"]


def test_a_repeated_group_meets_one_fate(make_group: MakeGroup) -> None:
    bench = Bench(PackConfig(groups_per_step=1))
    for _ in range(3):
        bench.arrive(0, make_group(1))
        bench.decide()
    assert len([e for e in bench.events if isinstance(e, GroupFate)]) == 1
    assert bench.committed[0] == 5


def test_no_plan_before_the_anchor_and_none_beyond_the_limit(make_group: MakeGroup) -> None:
    bench = Bench(PackConfig(groups_per_step=1, max_steps_ahead=1), latest_version=-1)
    for number in range(5):
        bench.arrive(0, make_group(number))
    decision = bench.packer.decide(0, caught_up=False)
    assert decision.catch_up  # version 0 is not known yet, so it may be from the future
    assert not decision.changed
    bench.publish(0)
    assert [e.step for e in bench.decide() if isinstance(e, PackedBatch)] == [1, 2]
    bench.publish(1)
    assert [e.step for e in bench.decide() if isinstance(e, PackedBatch)] == [3]


def test_a_version_that_no_plan_led_to_halts() -> None:
    bench = Bench(PackConfig())
    with pytest.raises(PlanViolation, match="another pack"):
        bench.publish(1)
    bench.packer.learn(version_event(7, OTHER), 2)  # of another lineage: not ours to judge


def test_taken_in_order_of_arrival_over_partitions(make_group: MakeGroup) -> None:
    bench = Bench(PackConfig(groups_per_step=4, max_steps_ahead=5))
    stamps = [(0, 10), (1, 11), (0, 30), (1, 12), (0, 5), (1, 31)]  # partition 0 has a clock that fell back
    groups = [make_group(i) for i in range(6)]
    for (partition, stamp), group in zip(stamps, groups, strict=True):
        bench.arrive(partition, group, timestamp_ms=stamp)
    [batch] = [e for e in bench.decide() if isinstance(e, PackedBatch)]
    assert batch.group_ids == tuple(groups[i].group_id for i in (0, 1, 3, 2))
    assert bench.committed == {0: 4, 1: 4}


operations = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(0, 1), st.integers(-6, 2), st.integers(0, 40)),
        st.tuples(st.just("arrive"), st.integers(0, 1), st.just(0), st.integers(0, 40)),
        st.tuples(st.sampled_from(["decide", "train", "restart", "poison", "alien"])),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(operations, st.integers(1, 4), st.integers(0, 3), st.integers(0, 2), st.integers(1, 3))
def test_laws_over_arbitrary_arrivals_versions_and_restarts(
    make_group: MakeGroup,
    script: list[tuple[str, int, int, int]],
    groups_per_step: int,
    max_lag: int,
    ahead: int,
    ranks: int,
) -> None:
    config = PackConfig(
        groups_per_step=groups_per_step,
        max_lag_versions=max_lag,
        max_steps_ahead=ahead,
        ranks=ranks,
        token_budget=16,
    )
    bench = Bench(config)
    sent: list[Group] = []
    for number, operation in enumerate(script):
        match operation[0]:
            case "arrive":
                _, partition, age, stamp = operation
                group = make_group(number, (max(0, bench.latest + age), max(0, bench.latest)))
                sent.append(group)
                bench.arrive(partition, group, stamp)
            case "alien":
                sent.append(make_group(number, lineage=OTHER))
                bench.arrive(number % 2, sent[-1])
            case "poison":
                bench.arrive(number % 2, Refused("malformed", "x"))
            case "restart":
                bench.restart()
            case "train":
                planned = max((e.step for e in bench.events if isinstance(e, PackedBatch)), default=0)
                if planned > bench.latest:
                    bench.publish(bench.latest + 1)
            case _:
                bench.decide()
    bench.decide()
    _check_laws(bench, sent)


def _check_laws(bench: Bench, sent: list[Group]) -> None:
    by_id = {group.group_id: group for group in sent}
    fates = [e for e in bench.events if isinstance(e, GroupFate)]
    assert len({f.group_id for f in fates}) == len(fates), "two fates for one group"
    plans = [e for e in bench.events if isinstance(e, PackedBatch) and e.rank == 0]
    assert [p.step for p in plans] == list(range(1, len(plans) + 1)), "a hole or a repeat in the steps"
    ranks = Counter(e.step for e in bench.events if isinstance(e, PackedBatch))
    assert all(count == bench.config.ranks for count in ranks.values())
    trained = [group_id for plan in plans for group_id in plan.group_ids]
    assert sorted(trained) == sorted(f.group_id for f in fates if f.reason == "trained")
    for plan in plans:
        assert plan.base_version == plan.step - 1
        assert len(plan.group_ids) == bench.config.groups_per_step
        spans = [s.version for i in plan.group_ids for m in by_id[i].members for s in m.rollout.spans]
        assert plan.base_version - min(spans) <= bench.config.max_lag_versions
        assert plan.oldest_version == min(spans)
    # What has no fate is still at or above the position, and what lies below it has one: nothing is lost.
    refused = [(r.record.partition, r.record.offset) for r in bench.refusals]
    assert len(set(refused)) == len(refused), "one record was refused twice"
    settled = {f.group_id for f in fates}
    waiting = 0
    for partition, records in bench.log.items():
        for record, event in records:
            done = (
                (partition, record.offset) in refused
                if isinstance(event, Refused)
                else event.group_id in settled
            )
            waiting += not done and not isinstance(event, Refused)
            assert done or record.offset >= bench.committed[partition]
    assert waiting + len(fates) == len(sent)
    # A plan is only waited for when groups are missing or the trainer is behind.
    behind = bench.latest < bench.packer.next_step - 1 - bench.config.max_steps_ahead
    assert behind or waiting < bench.config.groups_per_step
    assert bench.packer.buffered == waiting
