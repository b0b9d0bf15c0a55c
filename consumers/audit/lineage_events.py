"""What stands in the log about some groups: their rollouts, rewards, feedback and fates. Pure folds over records.

Everything about a group has its id as key, so whatever is of other groups is passed by without being decoded.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from rollwire.consumers.audit.lineage import FeedbackLine, RewardLine
from rollwire.consumers.audit.versions import position_of
from rollwire.schemas.identity import IDS
from rollwire.schemas.records import (
    DeadLetter,
    Event,
    Feedback,
    GroupFate,
    PackedBatch,
    Position,
    Reward,
    Rollout,
    Seal,
    TrainStep,
)
from rollwire.streams.seams.log import Record

KEYED: Final = ("rollouts", "production-rollouts", "rewards", "user-feedback", "group-fates")
"""Topics whose key is the group's id, as far as lineage reads them."""


class Sampled(NamedTuple):
    """A rollout without its arrays."""

    rollout_id: str
    group_id: str
    lineage: str
    environment: str
    fleet: str
    replica: str
    versions: tuple[int, ...]
    tokens: int
    finished_us: int
    sealed: Seal | None
    at: Position


class Decided(NamedTuple):
    event: GroupFate
    at: Position


class Gathered:
    """`add` takes records of `KEYED` whose key is in `keys`; repeats are dropped by their `ce_id`, the first counts."""

    def __init__(self, groups: set[str]) -> None:
        self.groups = groups
        self.keys = {group.encode() for group in groups}
        self.rollouts: dict[str, Sampled] = {}
        self.fates: dict[str, Decided] = {}
        self._rewards: dict[str, dict[str, RewardLine]] = {}  # by rollout, by ce_id
        self._feedback: dict[str, dict[str, FeedbackLine]] = {}

    def wants(self, record: Record) -> bool:
        return record.key in self.keys and record.value is not None

    def add(self, record: Record, event: Event) -> None:
        at = position_of(record)
        match event:
            case Rollout():  # a production rollout is one
                self.rollouts.setdefault(event.rollout_id, sampled_of(event, at))
            case Reward():
                line = _reward_line(event, at)
                self._rewards.setdefault(event.rollout_id, {}).setdefault(IDS[Reward](event), line)
            case Feedback():
                said = feedback_line(event, at)
                self._feedback.setdefault(event.rollout_id, {}).setdefault(IDS[Feedback](event), said)
            case GroupFate():
                self.fates.setdefault(event.group_id, Decided(event, at))
            case _:
                pass

    def rewards(self, rollout_id: str) -> tuple[RewardLine, ...]:
        return tuple(self._rewards.get(rollout_id, {}).values())

    def feedback(self, rollout_id: str) -> tuple[FeedbackLine, ...]:
        return tuple(self._feedback.get(rollout_id, {}).values())

    @property
    def judged(self) -> set[str]:
        """Rollouts that something was said about."""
        return set(self._rewards) | set(self._feedback)


class Plan(NamedTuple):
    """A step plan, as far as its ranks' records were read."""

    groups: tuple[str, ...]
    rollouts: frozenset[str]  # laid out in a microbatch of some rank
    ranks: frozenset[int]
    laid: frozenset[str]  # the groups with such a rollout


class Plans:
    """The plans of `steps`, from records of `packed-batches`. One that a step did not take is passed by: of another lineage,
    or laid out ahead of a revert."""

    def __init__(self, steps: list[TrainStep]) -> None:
        self._wanted = {(step.lineage, step.step, step.plan_digest) for step in steps}
        self._found: dict[tuple[str, int], Plan] = {}

    def add(self, event: Event) -> None:
        if not isinstance(event, PackedBatch):
            return
        if (event.lineage, event.step, event.plan_digest) not in self._wanted:
            return
        known = self._found.get((event.lineage, event.step))
        laid = frozenset(one for batch in event.microbatches for one in batch.rollout_ids)
        before = (frozenset[str](), frozenset[int]()) if known is None else (known.rollouts, known.ranks)
        rollouts = before[0] | laid
        groups = frozenset(one.rpartition(".")[0] for one in rollouts)
        self._found[event.lineage, event.step] = Plan(
            event.group_ids, rollouts, before[1] | {event.rank}, groups
        )

    def of(self, step: TrainStep) -> Plan | None:
        """None where no rank's record of it was read; `missing` says whether all were."""
        return self._found.get((step.lineage, step.step))

    def missing(self, step: TrainStep) -> int:
        """Ranks whose record of the plan was not found."""
        plan = self.of(step)
        return len(step.consumed) - (0 if plan is None else len(plan.ranks))


class Letters:
    """Dead letters of some events, found by their ids: `ce_id` stands in the headers that a letter keeps."""

    def __init__(self, ids: set[str]) -> None:
        self._needles = [one.encode() for one in ids]
        self.found: list[tuple[DeadLetter, Position]] = []

    def wants(self, record: Record) -> bool:
        value = record.value
        return value is not None and any(needle in value for needle in self._needles)

    def add(self, record: Record, event: Event) -> None:
        if isinstance(event, DeadLetter):
            self.found.append((event, position_of(record)))


def sampled_of(event: Rollout, at: Position) -> Sampled:
    versions = tuple(dict.fromkeys(span.version for span in event.spans))
    return Sampled(
        event.rollout_id,
        event.group_id,
        event.lineage,
        event.environment,
        event.fleet,
        event.replica,
        versions,
        event.spans[-1].end if event.spans else 0,
        event.finished_us,
        event.sealed,
        at,
    )


def feedback_line(event: Feedback, at: Position) -> FeedbackLine:
    said = event.label if event.label is not None else "" if event.value is None else f"{event.value:g}"
    return FeedbackLine(
        feedback_id=event.feedback_id,
        rollout_id=event.rollout_id,
        signal=event.signal,
        said=said,
        subject=event.subject,
        received_us=event.received_us,
        at=at,
    )


def _reward_line(event: Reward, at: Position) -> RewardLine:
    return RewardLine(
        rollout_id=event.rollout_id,
        reward=event.reward,
        outcome=event.outcome,
        source=event.source,
        verifier=f"{event.verifier} {event.verifier_version}",
        evidence=event.evidence,
        scored_us=event.scored_us,
        at=at,
    )


def erased_by(sealed: Seal | None, generations: int) -> bool:
    """Whether the data key that something is sealed with was destroyed: keys 1 to `generations` of its person were."""
    return sealed is not None and sealed.key <= generations
