"""What a reader saw, held against what must have come of the known load. Pure.

    lost        a group without its fate, a rollout without a place, a refusal without its dead letter, a step that was
                never taken or whose version is missing
    repeated    a group, a fate, a plan, a training use, a step, a version or a dead letter that is there twice; a record
                that the reader was given twice
    torn        a group with other members than known; a plan without all its ranks; one part of a transaction without
                the others: a fate without its plan, a plan without its fates, a step without its version
    wrong       another outcome than the known one, or something that nobody sent

A rollout has a place where a group, a fate or a dead letter names it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeVar

from rollwire.ops.chaos.workload import EMITTED, FATES, Known, KnownGroup
from rollwire.schemas.records import PackedBatch

_K = TypeVar("_K")
_V = TypeVar("_V")

What = Literal["lost", "repeated", "torn", "wrong"]
WHATS: Final[tuple[What, ...]] = ("lost", "repeated", "torn", "wrong")


class SeenMember(NamedTuple):
    rollout_id: str
    reward: float | None
    fingerprint: str


class SeenGroup(NamedTuple):
    group_id: str
    members: tuple[SeenMember, ...]


class SeenFate(NamedTuple):
    group_id: str
    decided_by: str
    reason: str
    members: tuple[str, ...]  # rollout ids


class SeenStep(NamedTuple):
    lineage: str
    step: int
    version: int
    plan_digest: str
    state_digest: str
    consumed: tuple[tuple[int, int, int], ...]  # partition, start, end of `packed-batches`


class SeenVersion(NamedTuple):
    lineage: str
    version: int
    step: int
    state_digest: str


class SeenLetter(NamedTuple):
    source: tuple[str, int, int]  # topic, partition, offset
    refused_by: str
    reason: str
    identity: str  # `ce_id` of what was refused


class Unreadable(NamedTuple):
    """A record of ours that does not decode."""

    why: str


Fact = SeenGroup | SeenFate | PackedBatch | SeenStep | SeenVersion | SeenLetter | Unreadable


class Sighting(NamedTuple):
    """One record that a reader was given, in the order it was."""

    topic: str
    partition: int
    offset: int
    fact: Fact


class Finding(NamedTuple):
    what: What
    text: str


class Totals(NamedTuple):
    """What can be added up on the side, without following any group."""

    groups: int  # records of `groups`
    fates: int
    plans: int  # of rank 0
    sequences: int  # laid out in plans
    steps: int
    versions: int
    letters: int
    reward_sum: float  # over the members of groups that were trained on


class Verdict(NamedTuple):
    findings: tuple[Finding, ...]
    totals: Totals
    expected: Totals  # `letters`: at least

    def number(self, what: What) -> int:
        return sum(finding.what == what for finding in self.findings)


@dataclass(slots=True)
class _Book:
    groups: dict[str, SeenGroup] = field(default_factory=dict)
    fates: dict[str, SeenFate] = field(default_factory=dict)
    plans: dict[tuple[int, int], PackedBatch] = field(default_factory=dict)  # step, rank
    steps: dict[int, SeenStep] = field(default_factory=dict)
    versions: dict[int, SeenVersion] = field(default_factory=dict)
    letters: dict[tuple[str, int, int, str], SeenLetter] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def say(self, what: What, text: str) -> None:
        self.findings.append(Finding(what, text))


def judge(known: Known, sightings: Iterable[Sighting], *, lineage: str, ranks: int) -> Verdict:
    """Everything that is wrong with what a reader saw after the last of the load was through."""
    book = _Book()
    totals = _read(book, sightings, lineage)
    refused = {letter.identity for letter in book.letters.values()} & known.letters.keys()
    for group_id, group in known.groups.items():
        _judge_group(book, group_id, group, refused)
    for group_id in (book.groups.keys() | book.fates.keys()) - known.groups.keys():
        book.say("wrong", f"group {group_id} was never sent")
    uses = _judge_plans(book, known, ranks)
    for group_id, fate in book.fates.items():
        if fate.decided_by == "pack" and fate.reason == "trained" and group_id not in uses:
            book.say("torn", f"group {group_id} has the fate trained, and no plan has it")
    _judge_steps(book, known)
    _judge_letters(book, known, refused)
    trained = {g for g, fate in book.fates.items() if fate.reason == "trained"}
    rewards = sum(m.reward or 0.0 for g in trained & book.groups.keys() for m in book.groups[g].members)
    return Verdict(tuple(book.findings), totals._replace(reward_sum=rewards), expected_totals(known))


def expected_totals(known: Known) -> Totals:
    trained = known.groups_of("trained")
    return Totals(
        groups=known.groups_of(*EMITTED),
        fates=len(known.groups),
        plans=known.steps,
        sequences=trained * _members(known),
        steps=known.steps,
        versions=known.steps + 1,
        letters=len(known.letters),
        reward_sum=known.reward_sum,
    )


def _members(known: Known) -> int:
    return len(next(iter(known.groups.values())).members) if known.groups else 0


def _read(book: _Book, sightings: Iterable[Sighting], lineage: str) -> Totals:
    """Files every sighting; whatever is there twice is said here."""
    last: dict[tuple[str, int], int] = {}
    numbers: Counter[str] = Counter()
    for sighting in sightings:
        where, fact = f"{sighting.topic}[{sighting.partition}]:{sighting.offset}", sighting.fact
        before = last.get((sighting.topic, sighting.partition), -1)
        if sighting.offset <= before:
            book.say("repeated", f"the reader was given {where} after offset {before}")
            continue
        last[sighting.topic, sighting.partition] = sighting.offset
        match fact:
            case Unreadable():
                book.say("torn", f"{where} does not decode: {fact.why}")
                continue
            case PackedBatch() | SeenStep() | SeenVersion() if fact.lineage != lineage:
                book.say("wrong", f"{where} is of lineage {fact.lineage}")
                continue
            case PackedBatch():
                numbers["plans"] += fact.rank == 0
                numbers["sequences"] += sum(len(micro.rollout_ids) for micro in fact.microbatches)
                _once(book, book.plans, (fact.step, fact.rank), fact, f"plan {fact.step}, rank {fact.rank}")
            case SeenGroup():
                numbers["groups"] += 1
                _once(book, book.groups, fact.group_id, fact, f"group {fact.group_id}")
            case SeenFate():
                numbers["fates"] += 1
                _once(book, book.fates, fact.group_id, fact, f"the fate of group {fact.group_id}")
            case SeenStep():
                numbers["steps"] += 1
                _once(book, book.steps, fact.step, fact, f"step {fact.step}")
            case SeenVersion():
                numbers["versions"] += 1
                _once(book, book.versions, fact.version, fact, f"version {fact.version}")
            case SeenLetter():
                numbers["letters"] += 1
                key = (*fact.source, fact.refused_by)
                source = f"{fact.source[0]}[{fact.source[1]}]:{fact.source[2]}"
                _once(book, book.letters, key, fact, f"the dead letter by {fact.refused_by} of {source}")
    return Totals(**{name: numbers[name] for name in Totals._fields if name != "reward_sum"}, reward_sum=0.0)


def _once(book: _Book, table: dict[_K, _V], key: _K, fact: _V, name: str) -> None:
    if key in table:
        book.say("repeated", f"{name} is there twice")
    else:
        table[key] = fact


def _judge_group(book: _Book, group_id: str, known: KnownGroup, refused: set[str]) -> None:
    seen, fate = book.groups.get(group_id), book.fates.get(group_id)
    if fate is None:
        book.say("lost", f"group {group_id} ({known.kind}) has no fate")
    elif fate.reason != FATES[known.kind]:
        book.say("wrong", f"group {group_id} ({known.kind}) has the fate {fate.decided_by}: {fate.reason}")
    if seen is None and known.kind in EMITTED:
        book.say("lost", f"group {group_id} ({known.kind}) never came out of assemble")
    if seen is not None:
        if known.kind not in EMITTED:
            book.say("wrong", f"group {group_id} ({known.kind}) came out of assemble")
        sent = tuple(SeenMember(m.rollout_id, m.reward, m.fingerprint) for m in known.members)
        if seen.members != sent:
            book.say("torn", f"group {group_id} came out with other members: {_differences(seen, sent)}")
    placed = {m.rollout_id for m in seen.members} if seen is not None else set[str]()
    placed |= set(fate.members) if fate is not None else set()
    for member in known.members:
        if member.rollout_id not in placed and member.rollout_id not in refused:
            book.say("lost", f"rollout {member.rollout_id} has no place")


def _differences(seen: SeenGroup, sent: tuple[SeenMember, ...]) -> str:
    got = {member.rollout_id: member for member in seen.members}
    names = [
        f"{m.rollout_id} {'differs' if m.rollout_id in got else 'is missing'}"
        for m in sent
        if got.get(m.rollout_id) != m
    ]
    names += [f"{extra} is not one of them" for extra in got.keys() - {m.rollout_id for m in sent}]
    return "; ".join(names) or "their order"


def _judge_plans(book: _Book, known: Known, ranks: int) -> dict[str, int]:
    """The step that uses each group; what a plan lacks and what is used twice is said."""
    uses: dict[str, int] = {}
    placed: set[str] = set()
    for step in sorted({step for step, _ in book.plans}):
        parts = [book.plans[step, rank] for rank in range(ranks) if (step, rank) in book.plans]
        if len(parts) < ranks:
            book.say("torn", f"plan {step} has {len(parts)} of {ranks} ranks")
            if not parts:
                continue
        if len({(part.plan_digest, part.base_version, part.group_ids) for part in parts}) > 1:
            book.say("torn", f"the ranks of plan {step} hold different plans")
        for group_id in parts[0].group_ids:
            if group_id in uses:
                book.say("repeated", f"group {group_id} is trained on in step {uses[group_id]} and in {step}")
                continue
            uses[group_id] = step
            fate = book.fates.get(group_id)
            if fate is None or fate.reason != "trained":
                book.say("torn", f"group {group_id} is in plan {step} without the fate trained")
        here = [rollout for part in parts for micro in part.microbatches for rollout in micro.rollout_ids]
        for rollout in here:
            if rollout in placed:
                book.say("repeated", f"rollout {rollout} is trained on twice, again in step {step}")
            placed.add(rollout)
        members = {
            m.rollout_id for g in parts[0].group_ids if g in known.groups for m in known.groups[g].members
        }
        if len(parts) == ranks and members != set(here):
            book.say("torn", f"plan {step} lays out {len(here)} rollouts, its groups have {len(members)}")
    return uses


def _judge_steps(book: _Book, known: Known) -> None:
    planned = {step for step, _ in book.plans}
    for step in range(1, known.steps + 1):
        if step not in planned:
            book.say("lost", f"there is no plan {step}")
        if step not in book.steps:
            book.say("lost", f"step {step} was never taken")
    for wanted in range(known.steps + 1):
        if wanted not in book.versions:
            book.say("lost", f"there is no version {wanted}")
    for step in sorted((planned | book.steps.keys()) - set(range(1, known.steps + 1))):
        book.say("wrong", f"there is a step {step}, the load is worth {known.steps}")
    ends: dict[int, int] = {}
    for number, taken in sorted(book.steps.items()):
        version = book.versions.get(taken.version)
        if version is None or version.step != number or version.state_digest != taken.state_digest:
            book.say("torn", f"step {number} and its version {taken.version} do not belong together")
        plan = book.plans.get((number, 0))
        if plan is not None and plan.plan_digest != taken.plan_digest:
            book.say("torn", f"step {number} was computed from another plan than the one that is there")
        for partition, start, end in taken.consumed:
            if ends.get(partition, start) != start:
                book.say(
                    "torn",
                    f"step {number} begins at {partition}:{start}, the one before ended at {ends[partition]}",
                )
            ends[partition] = end
    for version_number, seen in sorted(book.versions.items()):
        if version_number > 0 and seen.step not in book.steps:
            book.say("torn", f"version {version_number} has no step {seen.step}")


def _judge_letters(book: _Book, known: Known, refused: set[str]) -> None:
    for identity, reason in known.letters.items():
        if identity not in refused:
            book.say("lost", f"{identity} was to be refused ({reason}), and no dead letter has it")
    sent = _event_ids(known.groups)
    for letter in book.letters.values():
        at = f"{letter.source[0]}[{letter.source[1]}]:{letter.source[2]}"
        expected = known.letters.get(letter.identity)
        # A repeat that comes when its group is closed is late, whatever it says.
        if expected is None and letter.identity.partition("/")[0] in sent:
            expected = "late"
        if expected is None:
            book.say("wrong", f"a dead letter of {letter.identity or 'nothing'} at {at}, which nobody sent")
        elif letter.reason != expected:
            book.say("wrong", f"{letter.identity} at {at} was refused as {letter.reason}, not as {expected}")


def _event_ids(groups: Mapping[str, KnownGroup]) -> set[str]:
    return {member.rollout_id for group in groups.values() for member in group.members}
