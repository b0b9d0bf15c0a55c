"""Where records went, a column at a time: by the facts, by what consumers committed, and by what retention removed. Pure.

See `hours_book` for the rules.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from rollwire.consumers.audit.hours import HOUR_MS
from rollwire.consumers.audit.hours_columns import (
    OFFSET_BITS,
    UNNAMED,
    Column,
    Ints,
    Mask,
    among,
    first_of,
    ints,
    sorted_once,
    unpacked,
)
from rollwire.consumers.audit.hours_facts import Extra, Facts, Plan
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.partitioner import partition_for
from rollwire.streams.reverts import NO_REVERTS
from rollwire.streams.seams.log import TopicPartition

JOINED: Final = ("rollouts", "production-rollouts", "rewards", "routing-traces")
# Who consumes a topic transactionally: what it committed is decided. `rewards` has two readers: see `LIVE`.
CONSUMERS: Final = {
    **dict.fromkeys(JOINED, "assemble"),
    "production-rollouts": "assemble-production",
    "groups": "pack",
    "packed-batches": "trainer",
}
# Of the rewards, those of this kind are for `assemble-production`.
LIVE: Final = ("rewards", "assemble-production", "user")
LIVE_COLUMN: Final = "rewards of what people said"
ANSWERS: Final = ("rollouts", "production-rollouts")

LETTERS: Final = "dead-letters"
_NEVER: Final = 1 << 31

NOWHERE, ACCEPTED, REFUSED, SHED, PENDING = range(5)
CODES: Final = 5


class Judged(NamedTuple):
    """A column with its verdicts. Legend: N records."""

    places_N: Ints
    hours_N: Ints
    keys_N: Ints
    groups_N: Ints
    codes_N: Ints


class Unfounded(NamedTuple):
    """A rollout that a group or a fate names, and that does not exist. `key`: the hash of its id."""

    key: int
    hour: int
    topic: str  # that names it


def topic_of(name: str) -> str:
    """The topic whose records a column holds."""
    return LIVE[0] if name == LIVE_COLUMN else name


class Closing:
    """What all columns are judged by."""

    def __init__(
        self,
        facts: Facts,
        columns: Mapping[str, Column],
        begins: Mapping[TopicPartition, int],
        now_ms: int | None = None,
    ) -> None:
        self._now_ms = now_ms
        self._facts = facts
        self._columns = columns
        self._begins = begins
        self.reverts = facts.reverts()
        self.lapsed: Counter[str] = Counter()  # by topic
        refused: dict[str, list[int]] = defaultdict(list)
        for letter in facts.letters:
            refused[letter.source].append(letter.at)
        self._refused = {topic: sorted_once(places) for topic, places in refused.items()}
        self._members = sorted_once(facts.members.keys, facts.fated.keys)
        self._shed = sorted_once(facts.shed.keys)
        self._partial = sorted_once(facts.partial.keys)
        self._assembled = sorted_once(facts.assembled.keys)
        self._groups = sorted_once(facts.groups.keys)
        self._kept = sorted_once(facts.kept.keys)
        self._dropped = sorted_once(facts.dropped.keys)
        self._judged = sorted_once(facts.judged.keys)
        traced, planned = [facts.traced.keys], [facts.planned.keys]
        self._traced = sorted_once(*traced)
        if not self.whole("groups"):  # fates outlive groups, and name their members
            gone_N = ~among(ints(facts.fated_groups.keys), self._groups)
            self._traced = sorted_once(self._traced, ints(facts.fated.keys)[gone_N])
        if not self.whole("packed-batches"):
            planned += [facts.kept.keys, facts.dropped.keys]
        self._planned = sorted_once(*planned)

    def whole(self, *topics: str) -> bool:
        """Whether nothing of these topics was removed yet."""
        return all(offset == 0 for place, offset in self._begins.items() if place.topic in topics)

    def judge(self, name: str, column: Column, committed: Mapping[TopicPartition, int]) -> Judged:
        topic = topic_of(name)
        places_N, keys_N, hours_N = ints(column.places), ints(column.keys), ints(column.hours)
        groups_N = ints(column.groups) if topic in JOINED else keys_N
        refused_N = among(places_N, self._refused.get(topic, sorted_once()))
        accepted_N, shed_N = self._went(topic, places_N, keys_N, groups_N)
        pending_N = self._waits(topic, places_N, keys_N, committed)
        codes_N = np.select(
            [refused_N, accepted_N, shed_N, pending_N], [REFUSED, ACCEPTED, SHED, PENDING], NOWHERE
        )
        lapsed_N = (codes_N == NOWHERE) & (hours_N <= self._lapsed_until(topic))
        if lapsed_N.any():
            self.lapsed[topic] += int(lapsed_N.sum())
            codes_N[lapsed_N] = REFUSED
        return Judged(places_N, hours_N, keys_N, groups_N, codes_N)

    def _lapsed_until(self, topic: str) -> int:
        """The hour up to which refusals of a topic's records may have been removed by retention, -1 for none."""
        partitions = sum(place.topic == LETTERS for place in self._begins)
        if not partitions or topic == LETTERS:
            return -1
        partition = partition_for(topic.encode(), partitions)
        if not self._begins[TopicPartition(LETTERS, partition)]:
            return -1
        # No letter is older than its record, and none is let go of before its time: one that went earlier was taken away.
        over = _NEVER if self._now_ms is None else (self._now_ms - TOPICS[LETTERS].retention_ms) // HOUR_MS
        column = self._columns[LETTERS]
        there_N = ints(column.places) >> OFFSET_BITS == partition
        return min(over, int(ints(column.hours)[there_N].min())) if there_N.any() else over

    def _went(self, topic: str, places_N: Ints, keys_N: Ints, groups_N: Ints) -> tuple[Mask, Mask]:
        """Which were accepted, and which of the others were shed."""
        facts = self._facts
        none_N: Mask = np.zeros(len(keys_N), np.bool_)
        match topic:
            case "rollouts" | "production-rollouts":
                whole_N = among(keys_N, self._members) | among(groups_N, self._partial)
                return whole_N, among(keys_N, self._shed)
            case "rewards" | "routing-traces":
                members = self._members if topic == "rewards" else self._traced
                # A fate names the rollouts that were seen; what came with them went with them.
                taken_N = among(keys_N, members) | among(groups_N, self._partial)
                return taken_N, among(groups_N, self._assembled)
            case "user-feedback":
                # What the reward was made of is for the rules to say: not all that is said earns one.
                return among(keys_N, self._judged), among(keys_N, self._shed)
            case "groups":
                return among(keys_N, self._kept), among(keys_N, self._dropped)
            case "groups-closed" | "production-groups-closed":
                return among(keys_N, self._groups) | among(keys_N, self._assembled), none_N
            case "group-fates":
                unplanned_N = among(keys_N, self._kept) & ~among(keys_N, self._planned)
                return (keys_N != UNNAMED) & ~unplanned_N, none_N
            case "packed-batches":
                taken = [
                    plan.place
                    for plan in facts.plans
                    if self.passed_over_by(plan) is None and facts.taken(plan)
                ]
                passed = [plan.place for plan in facts.plans if self.passed_over_by(plan) is not None]
                return among(places_N, sorted_once(taken)), among(places_N, sorted_once(passed))
            case "train-steps":
                return among(keys_N, self._paired("steps")), none_N
            case "weight-versions":
                return among(keys_N, self._paired("versions")), none_N
            case _:
                return keys_N != UNNAMED, none_N

    def _waits(
        self, topic: str, places_N: Ints, keys_N: Ints, committed: Mapping[TopicPartition, int]
    ) -> Mask:
        if topic == "user-feedback":  # its window is open, or nobody knows its rollout yet
            open_N: Mask = keys_N != UNNAMED
            return open_N
        waits_N: Mask = np.zeros(len(places_N), np.bool_)
        if topic in CONSUMERS and len(places_N):
            partitions_N, offsets_N = places_N >> OFFSET_BITS, places_N & ((1 << OFFSET_BITS) - 1)
            stands_P = np.zeros(int(partitions_N.max()) + 1, np.int64)
            for partition in range(len(stands_P)):
                stands_P[partition] = committed.get(TopicPartition(topic, partition), 0)
            waits_N = offsets_N >= stands_P[partitions_N]
        return waits_N

    def passed_over_by(self, plan: Plan) -> int | None:
        """The version of the first revert that a plan did not know of, where it came before the plan's step."""
        reverts = self.reverts.get(plan.lineage, NO_REVERTS)
        if not reverts.passes_over(plan.step, plan.newest_revert):
            return None
        return next(one.version for one in reverts.known if one.version > (plan.newest_revert or 0))

    def _paired(self, of: str) -> Ints:
        """Ids of steps that have their version, or of versions that have their step; version 0 has none."""
        facts = self._facts
        found: list[int] = []
        if of == "steps":
            for (lineage, number), step in facts.steps.items():
                version = facts.versions.get((lineage, step.version))
                if version is not None and version.step == number:
                    found.append(hash(f"{lineage}/{number}"))
        else:
            for (lineage, number), version in facts.versions.items():
                step_of = facts.steps.get((lineage, version.step))
                if version.step == 0 or (step_of is not None and step_of.version == number):
                    found.append(hash(f"{lineage}/{number}"))
        return sorted_once(found)

    def letters(self, copies: Mapping[int, int]) -> list[Extra]:
        """Refusals of no record, and replays that were marked and did not happen. `copies`: replayed records by their letter."""
        extra: list[Extra] = []
        read = {
            topic: sorted_once(*(c.places for name, c in self._columns.items() if topic_of(name) == topic))
            for topic in {letter.source for letter in self._facts.letters}
        }
        begins: Counter[TopicPartition] = Counter(self._begins)
        by_place = {letter.place: letter for letter in self._facts.letters}
        for letter in self._facts.letters:
            partition, offset = unpacked(letter.at)
            source = f"{letter.source}[{partition}]:{offset}"
            kept = offset >= begins[TopicPartition(letter.source, partition)]
            if kept and not among(np.array([letter.at]), read[letter.source])[0]:
                extra.append(Extra(LETTERS, letter.hour, f"of no record: {source}", letter.place, ""))
        for place, times in self._facts.replayed.items():
            replayed = by_place.get(place)
            there = copies.get(place, 0)
            if replayed is not None and self.whole(replayed.source) and there < times:
                at = "{}:{}".format(*unpacked(place))
                told = f"{at} replayed {times} times, {there} times there"
                extra.append(Extra(LETTERS, replayed.hour, told, place, ""))
        return extra

    def unfounded(self) -> tuple[Unfounded, ...]:
        """Members of no rollout; none are sought where retention may have taken the rollouts of groups that are still there."""
        if not self.whole(*ANSWERS):
            return ()
        rollouts = sorted_once(*(self._columns[topic].keys for topic in ANSWERS))
        by_groups, by_fates = first_of(self._facts.members), first_of(self._facts.fated, self._facts.shed)
        known = {"groups": rollouts, "group-fates": sorted_once(rollouts, by_groups.keys)}
        found: list[Unfounded] = []
        for topic, marks in (("groups", by_groups), ("group-fates", by_fates)):
            lost_M = ~among(marks.keys, known[topic])
            rows = zip(marks.keys[lost_M].tolist(), marks.hours[lost_M].tolist(), strict=True)
            found += [Unfounded(key, hour, topic) for key, hour in rows]
        return tuple(found)
