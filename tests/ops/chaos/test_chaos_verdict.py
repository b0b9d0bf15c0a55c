"""The verdict can fail: every way of losing, repeating or tearing is planted once, and found by its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count, pairwise

import msgspec
import pytest

from rollwire.ops.chaos.faults import HOWS, plan_faults
from rollwire.ops.chaos.verdict import (
    SeenFate,
    SeenGroup,
    SeenLetter,
    SeenMember,
    SeenStep,
    SeenVersion,
    Sighting,
    Unreadable,
    Verdict,
    judge,
)
from rollwire.ops.chaos.workload import (
    EMITTED,
    FATES,
    LINEAGE,
    MODEL,
    Kind,
    Known,
    Planned,
    Workload,
    group_id,
    kinds,
    known,
    record_of,
    timetable,
)
from rollwire.schemas.errors import Refused
from rollwire.schemas.records import Cut, Microbatch, PackedBatch
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.log import Record

LOAD = Workload(
    seed=5,
    groups=300,
    rate=10.0,
    begin_us=1_767_225_600_000_000,
    deadline_s=20.0,
    horizon_s=40.0,
    groups_per_step=10,
)
KNOWN = known(LOAD)
RANKS = 2
Story = list[Sighting]


def plan(step: int, rank: int, groups: list[str]) -> PackedBatch:
    members = [m.rollout_id for g in groups for m in KNOWN.groups[g].members][rank::RANKS]
    micro = Microbatch(
        rollout_ids=tuple(members), cu_seqlens=b"", token_ids=b"", loss_mask=b"", logprobs=b"", versions=b"",
        advantages=b"", traces=(),
    )  # fmt: skip
    return PackedBatch(
        model=MODEL, lineage=LINEAGE, step=step, base_version=step - 1, rank=rank, ranks=RANKS, token_budget=256,
        max_lag_versions=9, total_sequences=0, total_tokens=0, group_ids=tuple(groups), oldest_version=0,
        reward_mean=0.0, microbatches=(micro,), plan_digest=f"plan-{step}", cut=Cut(inputs=(), clock_us=0),
    )  # fmt: skip


def good() -> Story:
    """What a reader sees when all went well."""
    offsets: Counter[tuple[str, int]] = Counter()
    story: Story = []

    def see(topic: str, partition: int, fact: object) -> None:
        offset = offsets[topic, partition] * 3  # control records make holes
        offsets[topic, partition] += 1
        story.append(Sighting(topic, partition, offset, fact))  # type: ignore[arg-type]

    trained: list[str] = []
    sources = count()
    see("weight-versions", 0, SeenVersion(LINEAGE, 0, 0, "s0"))
    for group, what in KNOWN.groups.items():
        if what.kind in EMITTED:
            members = tuple(SeenMember(m.rollout_id, m.reward, m.fingerprint) for m in what.members)
            see("groups", 0, SeenGroup(group, members))
        by = "pack" if what.kind in EMITTED else "assemble"
        came = tuple(m.rollout_id for m in what.members if m.in_time)
        see("group-fates", 0, SeenFate(group, by, FATES[what.kind], came))
        if what.kind == "trained":
            trained.append(group)
    for step in range(1, KNOWN.steps + 1):
        groups = trained[(step - 1) * 10 : step * 10]
        for rank in range(RANKS):
            see("packed-batches", rank, plan(step, rank, groups))
        ranges = tuple((rank, (step - 1) * 2, step * 2) for rank in range(RANKS))
        see("train-steps", 0, SeenStep(LINEAGE, step, step, f"plan-{step}", f"s{step}", ranges))
        see("weight-versions", 0, SeenVersion(LINEAGE, step, step, f"s{step}"))
    for identity, reason in KNOWN.letters.items():
        see("dead-letters", 0, SeenLetter(("rollouts", 0, next(sources)), "assemble", reason, identity))
    return story


def verdict(story: Story, what: Known = KNOWN) -> Verdict:
    return judge(what, story, lineage=LINEAGE, ranks=RANKS)


def found(story: Story) -> set[str]:
    return {finding.what for finding in verdict(story).findings}


def first(story: Story, kind: type, where: Callable[[Sighting], bool] = lambda _: True) -> int:
    return next(i for i, s in enumerate(story) if isinstance(s.fact, kind) and where(s))


def again(story: Story, at: int, topic: str = "") -> None:
    """The same fact at a later offset."""
    seen = story[at]
    story.append(seen._replace(offset=1_000_000))


def fate_of(kind: Kind) -> Callable[[Sighting], bool]:
    return lambda s: isinstance(s.fact, SeenFate) and KNOWN.groups[s.fact.group_id].kind == kind


def test_a_whole_story_is_found_good_and_adds_up() -> None:
    seen = verdict(good())
    assert seen.findings == ()
    assert seen.totals == seen.expected
    assert seen.totals.sequences == 4 * KNOWN.groups_of("trained")


@pytest.mark.parametrize(
    "kind", [SeenGroup, SeenFate, PackedBatch, SeenStep, SeenVersion, SeenLetter], ids=lambda k: k.__name__
)
def test_a_planted_loss_and_a_planted_repeat_of_every_kind_are_found(kind: type) -> None:
    story = good()
    again(story, first(story, kind))
    assert "repeated" in found(story)
    story = good()
    del story[first(story, kind)]
    # A plan without one of its ranks is no loss of the plan: it is torn.
    assert ("torn" if kind is PackedBatch else "lost") in found(story)


def test_a_record_that_the_reader_is_given_twice_is_found() -> None:
    story = good()
    story.append(story[first(story, SeenFate)])
    assert [f.what for f in verdict(story).findings] == ["repeated"]


def test_a_group_that_is_trained_on_twice_is_found() -> None:
    story = good()
    one = story[first(story, PackedBatch)].fact
    assert isinstance(one, PackedBatch)
    for at, seen in enumerate(story):
        if isinstance(seen.fact, PackedBatch) and seen.fact.step == 2:
            groups = (*seen.fact.group_ids[:-1], one.group_ids[0])
            story[at] = seen._replace(fact=msgspec.structs.replace(seen.fact, group_ids=groups))
    assert {"repeated", "torn"} <= found(story)


def test_a_torn_group_is_found() -> None:
    for change in (
        lambda m: m[:-1],  # a member less
        lambda m: (*m[:-1], m[-1]._replace(reward=99.0)),  # another reward
        lambda m: (*m[:-1], m[-1]._replace(fingerprint="other")),  # another rollout under its id
        lambda m: (m[1], m[0], *m[2:]),
    ):
        story = good()
        at = first(story, SeenGroup)
        group = story[at].fact
        assert isinstance(group, SeenGroup)
        story[at] = story[at]._replace(fact=group._replace(members=change(group.members)))
        assert [f.what for f in verdict(story).findings] == ["torn"]


def test_a_plan_without_its_fates_and_a_fate_without_its_plan_are_torn() -> None:
    story = good()
    step = KNOWN.steps
    gone = [s for s in story if not (isinstance(s.fact, PackedBatch) and s.fact.step == step)]
    assert {"torn", "lost"} <= found(gone)
    story = good()
    del story[first(story, SeenFate, fate_of("trained"))]
    assert {"torn", "lost"} <= found(story)


def test_a_step_without_its_version_and_a_version_without_its_step_are_torn() -> None:
    for kind in (SeenStep, SeenVersion):
        story = good()
        last = max(i for i, s in enumerate(story) if isinstance(s.fact, kind))
        del story[last]
        assert {"torn", "lost"} <= found(story)


def test_ranges_of_steps_that_do_not_join_are_torn() -> None:
    story = good()
    at = first(story, SeenStep, lambda s: isinstance(s.fact, SeenStep) and s.fact.step == 3)
    step = story[at].fact
    assert isinstance(step, SeenStep)
    story[at] = story[at]._replace(fact=step._replace(consumed=((0, 3, 6), (1, 4, 6))))
    assert found(story) == {"torn"}


def test_another_outcome_than_the_known_one_is_wrong() -> None:
    story = good()
    at = first(story, SeenFate, fate_of("equal"))
    fate = story[at].fact
    assert isinstance(fate, SeenFate)
    story[at] = story[at]._replace(fact=fate._replace(reason="incomplete"))
    assert found(story) == {"wrong"}
    story = good()
    story.append(Sighting("group-fates", 3, 0, fate._replace(group_id=group_id(LOAD, 9_999))))
    assert found(story) == {"wrong"}


def test_refusals_are_judged_by_what_was_refused() -> None:
    member = next(iter(KNOWN.groups.values())).members[0].rollout_id
    for identity, reason, expected in (
        (f"{member}/verifier/countdown/1", "late", set[str]()),  # a repeat behind its group's end
        (f"{member}/verifier/countdown/1", "malformed", {"wrong"}),
        ("poison-999999", "malformed", {"wrong"}),
    ):
        story = good()
        story.append(
            Sighting("dead-letters", 1, 0, SeenLetter(("rewards", 1, 7), "assemble", reason, identity))
        )
        assert found(story) == expected


def test_the_dead_letter_of_a_repeat_is_no_place_for_its_rollout() -> None:
    story = good()
    at = first(story, SeenFate, fate_of("equal"))
    fate = story[at].fact
    assert isinstance(fate, SeenFate)
    story[at] = story[at]._replace(fact=fate._replace(members=fate.members[1:]))
    story.append(
        Sighting("dead-letters", 1, 0, SeenLetter(("rollouts", 1, 7), "assemble", "late", fate.members[0]))
    )
    assert found(story) == {"lost"}


def test_what_does_not_decode_is_torn() -> None:
    story = good()
    story.append(Sighting("groups", 2, 0, Unreadable("malformed")))
    assert found(story) == {"torn"}


def test_the_load_is_the_same_each_time_and_its_parts_are_all_there() -> None:
    assert timetable(LOAD) == timetable(LOAD)
    chosen = kinds(LOAD)
    assert set(chosen) == set(FATES)
    assert chosen.count("trained") % LOAD.groups_per_step == 0
    planned = timetable(LOAD)
    repeats = Counter(planned_key(p) for p in planned)
    assert max(repeats.values()) == 2
    records = [record_of(LOAD, chosen, p) for p in planned]
    assert records == [record_of(LOAD, chosen, p) for p in planned]
    for record, one in zip(records, planned, strict=True):
        seen = Record(record.topic, 0, 0, 0, record.key, record.value, record.headers)
        if one.what != "poison":
            decode_record(seen)
            continue
        with pytest.raises(Refused) as refused:
            decode_record(seen)
        assert refused.value.reason == KNOWN.letters[f"poison-{one.number}"]


def planned_key(one: Planned) -> tuple[str, int, int]:
    return one.what, one.number, one.member


def test_everyone_is_hit_in_every_way_and_never_twice_in_a_row() -> None:
    whom = ("a", "b", "c", "broker")
    planned = plan_faults(whom, 26, seed=4)
    assert planned == plan_faults(whom, 26, seed=4)
    assert {(f.whom, f.how) for f in planned[:12]} == {(w, h) for w in whom for h in HOWS}
    assert all(a.whom != b.whom and a.at < b.at for a, b in pairwise(planned))
    assert [f.number for f in planned] == list(range(1, 27))
    assert planned[0].at > 0
    assert planned[-1].at < 1
