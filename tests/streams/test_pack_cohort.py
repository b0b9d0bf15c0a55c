"""Live traffic in plans: the cohort's baseline and coverage, its age, its share, and that neither kind of group holds up the other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rollwire.schemas.codec import decode, encode
from rollwire.schemas.errors import Refused
from rollwire.schemas.ids import opened_us
from rollwire.schemas.records import (
    Coverage,
    Cut,
    Event,
    Group,
    GroupFate,
    Member,
    Notice,
    PackedBatch,
    Rollout,
)
from rollwire.streams import synthetic
from rollwire.streams.pack import PackConfig, Packer, Refusal
from rollwire.streams.pack_cohort import Cohort, CohortConfig, Spoilt, below_floor, coverage_of, judge_cohort
from rollwire.streams.pack_layout import PlanFrame, lay_out, plan_digest
from rollwire.streams.seams.log import Record

START_US = 1_767_225_600_000_000
SECOND_US = 1_000_000


class MakeGroup(Protocol):
    def __call__(
        self, number: int, versions: Sequence[int] = (0,), *, lineage: str = synthetic.LINEAGE
    ) -> Group: ...


def answer(
    number: int,
    reward: float | None = 0.0,
    *,
    signals: int | None = None,
    outcome: str = "answered",
    opened: int = START_US,
    version: int = 0,
    sampled: int = 5,
) -> Group:
    """A group as `assemble-production` writes it; by default a scored one has one signal."""
    group_id = synthetic.group_id(opened, number)
    live = synthetic.answer(group_id, at_us=opened, outcome=outcome, version=version, sampled=sampled)
    signals = (reward is not None) if signals is None else signals
    return Group(
        group_id=group_id,
        model=live.model,
        lineage=live.lineage,
        environment=live.environment,
        task_id=live.task_id,
        group_size=1,
        baseline="cohort",
        members=(
            Member(
                rollout=Rollout(**{name: getattr(live, name) for name in Rollout.__struct_fields__}),
                reward=reward,
                advantage=None,
                trace=None,
                signals=int(signals),
            ),
        ),
        cut=Cut(inputs=(), clock_us=opened),
    )


def judged(groups: Sequence[Group], **config: Any) -> Cohort:
    found = judge_cohort(groups, CohortConfig(**config))
    assert isinstance(found, Cohort), found
    return found


def spoilt(groups: Sequence[Group], **config: Any) -> Spoilt:
    found = judge_cohort(groups, CohortConfig(**config))
    assert isinstance(found, Spoilt), found
    return found


@given(st.lists(st.none() | st.floats(-1, 1), min_size=2, max_size=12))
def test_the_baseline_is_the_mean_of_the_others_that_were_scored(rewards: list[float | None]) -> None:
    scored = [reward for reward in rewards if reward is not None]
    groups = [answer(number, reward) for number, reward in enumerate(rewards)]
    found = judge_cohort(groups, CohortConfig(coverage_floor=0))
    if len(set(scored)) < 2:
        assert isinstance(found, Spoilt)
        assert found.reason == ("unscorable" if len(scored) < 2 else "equal_rewards")
        return
    assert isinstance(found, Cohort)
    assert found.mean == pytest.approx(math.fsum(scored) / len(scored))
    for group, reward in zip(found.groups, rewards, strict=True):
        (member,) = group.members
        if reward is None:
            assert member.advantage is None
        else:
            others = list(scored)
            others.remove(reward)
            assert member.advantage == pytest.approx(reward - math.fsum(others) / len(others), abs=1e-12)


def test_c78_silence_is_counted_for_each_outcome_class() -> None:
    """C78: ten interactions, three end in a tool error and two in nothing, all five without a word."""
    groups = [answer(n, float(n % 2)) for n in range(5)]
    groups += [answer(5 + n, None) for n in range(2)]
    groups += [answer(7 + n, None, outcome="tool_error") for n in range(3)]
    assert coverage_of(groups) == (
        Coverage(outcome="answered", rollouts=7, signalled=5, scored=5),
        Coverage(outcome="tool_error", rollouts=3, signalled=0, scored=0),
    )
    found = spoilt(groups, coverage_floor=0.2)  # 5/10 of all, but 0/3 of the class that was gamed
    assert (found.fate, found.reason, found.bare) == ("dropped", "coverage", "tool_error 0/3")
    assert spoilt(groups, coverage_floor=0.6).bare == "tool_error 0/3; all 5/10"
    assert judged(groups, coverage_floor=0).coverage == coverage_of(groups)


def test_a_rule_for_silence_covers_a_class() -> None:
    """Somebody has said what ending in a tool error is worth: nothing is gained by its silence."""
    groups = [answer(n, 1.0) for n in range(5)]
    groups += [answer(5 + n, -1.0, signals=0, outcome="tool_error") for n in range(3)]
    found = judged(groups, coverage_floor=0.5)
    assert found.coverage[1] == Coverage(outcome="tool_error", rollouts=3, signalled=0, scored=3)


@pytest.mark.parametrize(
    ("rows", "floor", "least", "bare"),
    [
        ([("a", 10, 5)], 0.5, 3, []),  # the floor itself is enough
        ([("a", 20, 11)], 0.55, 3, []),  # 0.55 * 20 is above 11 in floating point
        ([("a", 10, 4)], 0.5, 3, ["a 4/10", "all 4/10"]),
        ([("a", 10, 10), ("b", 2, 0)], 0.5, 3, []),  # too few for a judgement of their own
        ([("a", 10, 10), ("b", 2, 0), ("c", 1, 0)], 0.5, 3, ["b and c 0/3"]),
        ([("a", 10, 10), ("b", 1, 0)], 0.5, 1, ["b 0/1"]),
        ([("", 3, 0), ("a", 9, 9)], 0.5, 3, ["not said 0/3"]),
        ([("a", 2, 0)], 0.5, 3, ["all 0/2"]),
    ],
)
def test_what_is_below_the_floor(
    rows: list[tuple[str, int, int]], floor: float, least: int, bare: list[str]
) -> None:
    coverage = [Coverage(outcome=o, rollouts=n, signalled=s, scored=s) for o, n, s in rows]
    assert below_floor(coverage, floor, least) == bare


def test_equal_rewards_may_be_kept() -> None:
    groups = [answer(n, 0.5) for n in range(3)]
    assert (spoilt(groups).fate, spoilt(groups).reason) == ("filtered", "equal_rewards")
    kept = judged(groups, equal_rewards="keep")
    assert [group.members[0].advantage for group in kept.groups] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("pack", "cohort", "says"),
    [
        ({"groups_per_step": 3}, {"production_share": 0.1}, "at least 2"),
        ({"groups_per_step": 4}, {"production_share": 0.9}, "leaves no other"),
        ({"groups_per_step": 8}, {"production_share": 1, "max_waiting": 7}, "no cohort"),
        ({"max_buffered_groups": 512}, {"production_share": 0.5}, "must hold"),
        ({}, {"production_share": 1.1}, "less than or equal"),
    ],
)
def test_wrong_shares_are_wrong_settings(pack: dict[str, Any], cohort: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        PackConfig(**pack, cohort=CohortConfig(**cohort))


class Bench:
    """A Packer over two partitions, and the log that a restart finds."""

    def __init__(self, config: PackConfig, *, restarts: bool = False) -> None:
        self.config = config
        self.restarts = restarts  # before every decision
        self.now_us = START_US
        self.latest = 0
        self.log: dict[int, list[tuple[Record, Group | Refused]]] = {0: [], 1: []}
        self.order: list[tuple[Record, Group | Refused]] = []  # over both partitions
        self.committed = {0: 0, 1: 0}
        self.events: list[Event] = []
        self.refusals: list[Refusal] = []
        self.restart()

    def restart(self) -> None:
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
            lineage=synthetic.LINEAGE,
            next_step=max(steps, default=0) + 1,
            positions=self.committed,
            decided=[fate.group_id for fate in fates],
            decided_below=below,
        )
        for version in range(self.latest + 1):
            self.packer.learn(synthetic.version(version, at_us=0), version)
        for record, event in self.order:
            if record.offset >= self.committed[record.partition]:
                self.packer.receive(record, event)

    def publish(self) -> None:
        """The trainer takes the next step, if one is planned."""
        if self.packer.next_step > self.latest + 1:
            self.latest += 1
            self.packer.learn(synthetic.version(self.latest, at_us=0), self.latest)

    def arrive(self, *groups: Group | Refused, partition: int = 0) -> None:
        for group in groups:
            offset = 2 * len(self.log[partition])
            record = Record("groups", partition, offset, self.now_us // 1_000, b"key", b"raw", ())
            self.log[partition].append((record, group))
            self.order.append((record, group))
            self.packer.receive(record, group)

    def decide(self, *, at_end: bool = False) -> list[Event]:
        if self.restarts:
            self.restart()
        found: list[Event] = []
        while (decision := self.packer.decide(self.now_us, caught_up=True, at_end=at_end)).changed:
            found += decision.events
            self.refusals += decision.refusals
            self.committed = decision.positions
        self.events += found
        return found

    def fates(self) -> dict[str, str]:
        return {e.group_id: e.reason for e in self.events if isinstance(e, GroupFate)}

    def plans(self) -> list[PackedBatch]:
        return [e for e in self.events if isinstance(e, PackedBatch) and e.rank == 0]


def live_only(groups: int = 4, **cohort: Any) -> PackConfig:
    settings_ = CohortConfig(**{"production_share": 1.0, **cohort})
    return PackConfig(groups_per_step=groups, cohort=settings_, max_steps_ahead=5, token_budget=64)


def mixed(**cohort: Any) -> PackConfig:
    settings_ = CohortConfig(**{"production_share": 0.5, **cohort})
    return PackConfig(groups_per_step=4, cohort=settings_, max_steps_ahead=50, token_budget=64)


def test_a_cohort_makes_a_plan_that_says_what_it_was_judged_by() -> None:
    bench = Bench(live_only(coverage_floor=0.5, max_age_s=60))
    groups = [answer(0, 1.0), answer(1, None), answer(2, 0.0, outcome="tool_error"), answer(3, 0.5)]
    bench.arrive(*groups)
    bench.decide()
    [plan] = bench.plans()
    assert plan.group_ids == tuple(group.group_id for group in groups)
    assert (plan.cohort_size, plan.cohort_mean, plan.max_age_ms) == (4, 0.5, 60_000)
    assert plan.coverage == coverage_of(groups)
    assert (plan.total_sequences, plan.reward_mean) == (3, 0.5)  # the silent one is counted, not trained on
    assert set(bench.fates().values()) == {"trained"}
    members = {m.rollout.rollout_id: m for group in groups for m in group.members}
    advantages = {0: 0.75, 2: -0.75, 3: 0.0}  # of 1, 0 and 0.5: each minus the mean of the other two
    for microbatch in plan.microbatches:
        found = np.frombuffer(microbatch.advantages, "<f4").tolist()
        for rollout_id, seal, advantage in zip(microbatch.rollout_ids, microbatch.seals, found, strict=True):
            number = next(i for i, g in enumerate(groups) if rollout_id.startswith(g.group_id))
            assert advantage == advantages[number]
            assert seal == members[rollout_id].rollout.sealed
        sealed = b"".join(members[i].rollout.token_ids for i in microbatch.rollout_ids)
        assert microbatch.token_ids == sealed
    encoded = encode(plan, source="test", time_us=START_US)
    assert decode(encoded.topic, encoded.value, encoded.headers, encoded.key) == plan


def test_the_digest_covers_seals_and_cohort_where_there_are_any() -> None:
    bench = Bench(live_only(coverage_floor=0))
    bench.arrive(*[answer(n, float(n)) for n in range(4)])
    bench.decide()
    [plan] = bench.plans()
    digests = {plan_digest([plan])}
    assert digests == {plan.plan_digest}
    [microbatch] = plan.microbatches
    assert microbatch.seals[0] is not None
    other = msgspec.structs.replace(microbatch.seals[0], nonce=b"x" * 12)
    for changes in (
        {"microbatches": (msgspec.structs.replace(microbatch, seals=(other, *microbatch.seals[1:])),)},
        {"cohort_mean": 0.25},
        {"cohort_size": 5},
        {"max_age_ms": 1},
        {"coverage": (msgspec.structs.replace(plan.coverage[0], signalled=0),)},
    ):
        digests.add(plan_digest([msgspec.structs.replace(plan, **changes)]))
    assert len(digests) == 6


def test_c78_a_cohort_below_the_floor_is_dropped_with_a_notice_and_the_next_one_goes_on() -> None:
    """C78: nothing is trained on, an event says why, and which class."""
    bench = Bench(live_only(coverage_floor=0.5))
    silent = [answer(n, None, outcome="tool_error") for n in range(3)]
    bench.arrive(answer(9, 1.0), *silent, *[answer(20 + n, None) for n in range(4)])
    bench.arrive(*[answer(10 + n, float(n)) for n in range(4)])
    bench.decide()
    reasons = Counter(bench.fates().values())
    assert reasons == {"coverage": 8, "trained": 4}
    assert bench.plans()[0].step == 1
    first, second = [e for e in bench.events if isinstance(e, Notice)]
    assert (first.name, first.severity) == ("coverage", "alarm")
    assert first.attributes["outcome.tool_error"] == "0 of 3 with a signal, 0 scored"
    assert first.attributes["below_floor"] == "tool_error 0/3; all 1/4"
    assert second.attributes["below_floor"] == "answered 0/4; all 0/4"
    # Two of one moment have two ids.
    ids = [encode(n, source="test", time_us=START_US).headers[3] for n in (first, second)]
    assert ids[0] != ids[1]
    dropped = next(e for e in bench.events if isinstance(e, GroupFate) and e.reason == "coverage")
    assert (dropped.fate, dropped.decided_by, dropped.group_size) == ("dropped", "pack", 1)


def test_an_answer_may_be_as_old_as_the_limit_and_no_older() -> None:
    bench = Bench(live_only(groups=2, max_age_s=60, coverage_floor=0))
    old, young = answer(0, 1.0), answer(1, 0.0, opened=START_US + 1_000)
    bench.arrive(old, young)
    bench.now_us = START_US + 60 * SECOND_US
    bench.decide()
    assert bench.fates()[old.group_id] == "trained"
    alone = Bench(live_only(groups=2, max_age_s=60))
    alone.arrive(old)
    alone.decide()
    assert alone.packer.due_us == START_US + 60 * SECOND_US + 1
    alone.now_us = START_US + 60 * SECOND_US + 1
    alone.decide()
    assert alone.fates() == {old.group_id: "too_old"}
    assert alone.packer.due_us is None
    assert alone.committed == {0: 1, 1: 0}


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_kind_that_no_plan_takes_is_not_held(make_group: MakeGroup, share: float) -> None:
    """Else it would hold back the committed offset for ever."""
    bench = Bench(PackConfig(groups_per_step=2, cohort=CohortConfig(production_share=share)))
    groups = [answer(0), make_group(1, lineage=synthetic.LINEAGE)]
    bench.arrive(*groups)
    bench.decide()
    foreign = groups[0 if share == 0 else 1]
    assert bench.fates() == {foreign.group_id: "no_place"}
    assert not bench.refusals


def test_more_answers_than_may_wait_lose_their_oldest() -> None:
    bench = Bench(live_only(groups=4, max_waiting=4, max_age_s=60))
    bench.latest = -1  # version 0 is not there yet: nothing is planned
    bench.restart()
    groups = [answer(n, 1.0, version=0) for n in range(3)]
    bench.arrive(*groups)
    bench.packer.learn(synthetic.version(0, at_us=0), 0)
    bench.arrive(*[answer(10 + n, None, version=0) for n in range(6)])
    bench.decide()
    assert [e.group_id for e in bench.events if isinstance(e, GroupFate) and e.reason == "crowded_out"] == [
        group.group_id
        for group, _ in zip([g for _, g in bench.log[0] if isinstance(g, Group)], range(5), strict=False)
    ]


def test_a_mix_takes_its_share_of_each_kind_in_order(make_group: MakeGroup) -> None:
    bench = Bench(mixed(coverage_floor=0))
    sampled = [make_group(100 + n, lineage=synthetic.LINEAGE) for n in range(5)]
    live = [answer(n, float(n)) for n in range(3)]
    bench.arrive(*sampled[:4], live[0], sampled[4], *live[1:])
    bench.decide()
    [plan] = bench.plans()
    assert plan.group_ids == tuple(g.group_id for g in (*sampled[:2], *live[:2]))
    assert (plan.cohort_size, plan.cohort_mean) == (2, 0.5)
    assert plan.total_sequences == 6
    # What is decided above the position is known to whoever comes next.
    assert bench.committed == {0: 4, 1: 0}
    assert bench.packer.decided_above == {0: 13}
    bench.restart()
    assert bench.decide() == []


def test_one_kind_alone_waits_for_the_other_only_so_long(make_group: MakeGroup) -> None:
    bench = Bench(mixed(max_wait_s=30))
    bench.arrive(*[make_group(100 + n, lineage=synthetic.LINEAGE) for n in range(5)])
    bench.decide(at_end=True)
    assert not bench.plans()
    assert bench.packer.due_us == START_US + 30 * SECOND_US
    bench.now_us += 30 * SECOND_US
    bench.decide()
    assert not bench.plans()  # what is missing may stand in the log
    bench.decide(at_end=True)
    [plan] = bench.plans()
    assert (len(plan.group_ids), plan.cohort_size, plan.coverage, plan.max_age_ms) == (4, 0, (), None)


def test_a_buffer_full_of_one_kind_is_no_deadlock(make_group: MakeGroup) -> None:
    """Reading is paused, and the answers that a mixed plan needs stand behind what fills the buffer."""
    config = PackConfig(
        groups_per_step=4,
        max_buffered_groups=8,
        cohort=CohortConfig(production_share=0.5, max_waiting=4, max_wait_s=1e6),
        max_steps_ahead=50,
    )
    bench = Bench(config)
    bench.arrive(*[make_group(100 + n, lineage=synthetic.LINEAGE) for n in range(8)])
    assert bench.packer.full
    bench.decide()
    assert [plan.cohort_size for plan in bench.plans()] == [0]
    assert not bench.packer.full
    bench.arrive(*[answer(n, float(n)) for n in range(4)])
    bench.decide()
    assert [plan.cohort_size for plan in bench.plans()] == [0, 2, 2]


answers = st.tuples(
    st.just("live"),
    st.integers(0, 1),
    st.sampled_from([0, 0, 0, -1, -4]),
    st.sampled_from([None, 0.0, 0.5, 1.0]),
    st.sampled_from(["answered", "answered", "tool_error"]),
    st.sampled_from([0, 0, 0, 40, 90]),
)
sampled_groups = st.tuples(st.just("sampled"), st.integers(0, 1), st.sampled_from([0, 0, -1, -4]))
operations = st.lists(
    st.one_of(
        answers,
        answers,
        sampled_groups,
        sampled_groups,
        st.tuples(st.just("wait"), st.sampled_from([1, 20, 70])),
        st.tuples(st.sampled_from(["decide", "at end", "train", "train", "poison"])),
    ),
    min_size=30,
    max_size=90,
)


@settings(max_examples=120, deadline=None)
@given(
    operations,
    st.sampled_from([0.0, 0.4, 0.5, 0.6, 1.0]),
    st.sampled_from([0.0, 0.3, 0.7]),
    st.integers(0, 3),
    st.integers(5, 9),
)
def test_laws_over_arbitrary_arrivals_of_both_kinds(
    make_group: MakeGroup,
    script: list[tuple[Any, ...]],
    share: float,
    floor: float,
    max_lag: int,
    max_waiting: int,
) -> None:
    """Each group one fate, whole plans of the share, no trained cohort below its floor or beyond its age; nothing lost,
    nothing waits for ever; and a restart before every decision changes none."""
    config = PackConfig(
        groups_per_step=5,
        max_lag_versions=max_lag,
        max_buffered_groups=max_waiting + 5,
        token_budget=32,
        ranks=2,
        cohort=CohortConfig(
            production_share=share,
            coverage_floor=floor,
            coverage_min_rollouts=2,
            max_age_s=60,
            max_wait_s=30,
            max_waiting=max_waiting,
        ),
    )
    benches = (Bench(config), Bench(config, restarts=True))
    sent: list[Group] = []
    for bench in benches:
        sent = play(bench, make_group, script)
    plain, restarted = benches
    assert plain.events == restarted.events
    assert plain.committed == restarted.committed
    check_laws(plain, sent)


def play(bench: Bench, make_group: MakeGroup, script: list[tuple[Any, ...]]) -> list[Group]:
    sent: list[Group] = []
    for number, (kind, *details) in enumerate(script):
        match kind:
            case "live":
                partition, age, reward, outcome, late_s = details
                group = answer(
                    number,
                    reward,
                    outcome=outcome,
                    opened=bench.now_us - late_s * SECOND_US,
                    version=max(0, bench.latest + age),
                )
            case "sampled":
                partition, age = details
                group = make_group(number, (max(0, bench.latest + age),), lineage=synthetic.LINEAGE)
            case _:
                if kind == "wait":
                    bench.now_us += details[0] * SECOND_US
                elif kind == "poison":
                    bench.arrive(Refused("malformed", "x"), partition=number % 2)
                elif kind == "train":
                    bench.publish()
                else:
                    bench.decide(at_end=kind == "at end")
                continue
        sent.append(group)
        bench.arrive(group, partition=partition)
        if bench.packer.full:
            bench.decide()
        bench.now_us += 1_000
    # The end: the trainer keeps up, time passes, everything is read.
    for _ in range(40):
        bench.decide(at_end=True)
        bench.publish()
        bench.now_us += 5 * SECOND_US
    bench.decide(at_end=True)
    return sent


def check_laws(bench: Bench, sent: list[Group]) -> None:
    config, cohort = bench.config, bench.config.cohort
    by_id = {group.group_id: group for group in sent}
    fates = [e for e in bench.events if isinstance(e, GroupFate)]
    assert len({fate.group_id for fate in fates}) == len(fates), "two fates for one group"
    plans = bench.plans()
    assert [plan.step for plan in plans] == list(range(1, len(plans) + 1))
    trained = [group_id for plan in plans for group_id in plan.group_ids]
    assert sorted(trained) == sorted(fate.group_id for fate in fates if fate.reason == "trained")
    for plan in plans:
        live = [by_id[i] for i in plan.group_ids if by_id[i].baseline == "cohort"]
        assert len(plan.group_ids) == config.groups_per_step
        shares = {config.live_groups, *((0, config.groups_per_step) if config.mix.both else ())}
        assert len(live) in shares
        assert plan.cohort_size == len(live)
        assert plan.coverage == coverage_of(live)
        assert not live or not below_floor(plan.coverage, cohort.coverage_floor, cohort.coverage_min_rollouts)
        for group in live:
            assert plan.cut.clock_us - opened_us(group.group_id) <= cohort.max_age_s * 1e6
        spans = [s.version for i in plan.group_ids for m in by_id[i].members for s in m.rollout.spans]
        assert plan.oldest_version == min(spans)
        assert plan.base_version - min(spans) <= config.max_lag_versions
        batches = [e for e in bench.events if isinstance(e, PackedBatch) and e.step == plan.step]
        assert plan_digest(batches) == plan.plan_digest
        # From the groups and the settings alone an auditor comes to the same plan.
        judged_ = judge_cohort(live, cohort) if live else None
        assert judged_ is None or isinstance(judged_, Cohort)
        others = [by_id[i] for i in plan.group_ids if by_id[i].baseline != "cohort"]
        frame = PlanFrame(
            plan.model,
            plan.lineage,
            plan.step,
            plan.base_version,
            config.ranks,
            config.microbatch_tokens,
            config.max_lag_versions,
            config.cost,
            plan.cut,
            cohort=judged_,
        )
        again = lay_out([*others, *(judged_.groups if judged_ else ())], frame)
        assert list(again) == batches
    notices = [e for e in bench.events if isinstance(e, Notice)]
    assert len({notice.at_us for notice in notices}) == len(notices)
    bare = sum(fate.reason == "coverage" for fate in fates)
    assert bare == sum(int(notice.attributes["rollouts"]) for notice in notices)
    # What has no fate stands at or above the position; of live traffic there is none left, of the others no whole plan.
    settled = {fate.group_id for fate in fates}
    left = [
        (partition, record.offset, event)
        for partition, records in bench.log.items()
        for record, event in records
        if isinstance(event, Group) and event.group_id not in settled
    ]
    assert all(offset >= bench.committed[partition] for partition, offset, _ in left)
    assert len(left) + len(fates) == len(sent)
    assert not [event for *_, event in left if event.baseline == "cohort"]
    assert len(left) < config.groups_per_step
    assert not left or bench.packer.decided_above.keys() <= {partition for partition, *_ in left}
    unread = [
        (x.record.partition, x.record.offset) for x in bench.refusals if x.refused.reason == "malformed"
    ]
    assert len(set(unread)) == len(unread)
