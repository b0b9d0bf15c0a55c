"""What lineage answers, as records: where a version came from, or where an event went. Pure.

Both directions give the same graph, read from left to right:

    feedback -> rollouts and their rewards -> groups -> steps (and their plans) -> versions -> fleets

Asked for a version, it holds all that the version's own step took in; asked for an event or a person, all that they
reached. A version carries what the versions that it was made from were trained on: `Reached.carried` names those, their
own steps are asked for by their own numbers.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rollwire.schemas.records import Claim, OffsetRange, Position
from rollwire.streams.findings import Report

PlanSource = Literal["packed-batches", "group-fates", "none"]


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what an answer holds."""


class FeedbackLine(_Record, frozen=True, kw_only=True):
    feedback_id: str
    rollout_id: str
    signal: str
    said: str  # the value or the word, as it came; "" = a comment alone
    subject: str  # pseudonym; "" = not said
    received_us: int
    at: Position


class RewardLine(_Record, frozen=True, kw_only=True):
    rollout_id: str
    reward: float | None
    outcome: str
    source: str  # "verifier" | "judge" | "user"
    verifier: str  # "<name> <version>"
    evidence: tuple[str, ...]  # feedback ids that it was derived from
    scored_us: int
    at: Position


class RolloutLine(_Record, frozen=True, kw_only=True):
    rollout_id: str
    group_id: str
    lineage: str
    environment: str
    fleet: str
    replica: str
    versions: tuple[int, ...]  # that sampled it, in order
    tokens: int  # sampled
    finished_us: int
    subject: str  # whose live traffic it is; "" = nobody's
    erased: bool  # that person's keys were destroyed
    trained: bool | None  # in a step of `Answer.steps`; None = the plan is gone, its group was in it
    rewards: tuple[RewardLine, ...]
    feedback: tuple[FeedbackLine, ...]
    at: Position


class GroupLine(_Record, frozen=True, kw_only=True):
    group_id: str
    fate: str  # "kept", "filtered", "dropped"; "" = not decided, or its event is gone
    reason: str
    detail: str
    decided_us: int  # 0 = not decided
    planned: int | None  # the version whose step plan took it; None = none did, or that plan was passed over
    made: (
        int | None
    )  # the version that it was trained into: the same, where a token of it was laid out; else None
    rollouts: tuple[RolloutLine, ...]
    absent: tuple[
        str, ...
    ]  # rollouts that the plan or the fate names, and that are neither in log nor archive
    at: Position | None  # of its fate


class StepLine(_Record, frozen=True, kw_only=True):
    lineage: str
    step: int
    base_version: int
    version: int
    reverts_to: int | None  # then it trained on nothing
    consumed: tuple[OffsetRange, ...]
    plan_digest: str
    state_digest: str
    loss: float | None
    reward_mean: float
    learning_rate: float
    max_lag: int
    groups: int
    sequences: int
    trained_tokens: int
    erased_sequences: int
    code: str  # of the trainer; "" = not recorded
    settings: dict[str, str]
    finished_us: int
    plan_from: PlanSource  # where the answer has the plan's groups from
    at: Position


class SettingsLine(_Record, frozen=True, kw_only=True):
    """What a processor had said it decides with when a step was taken."""

    processor: str  # "assemble", "pack", "attribute", ...
    code: str
    digest: str  # blake3 hex of the settings
    config: dict[str, Any]  # by section, as in a run's settings
    since_us: int
    at: Position


class Stored(_Record, frozen=True, kw_only=True):
    key: str
    size: int  # bytes
    sha256: str
    what: str  # "manifest", "shard", "anchor", "checkpoint"
    there: bool


class WayStep(_Record, frozen=True, kw_only=True):
    """One step of the way by which the version is rebuilt from the store."""

    kind: str  # "anchor", "delta", "skip", "inverse", "same"
    base: int | None
    version: int
    bytes: int


class VersionLine(_Record, frozen=True, kw_only=True):
    lineage: str
    model: str
    version: int
    kind: str
    base_version: int | None
    reverts_to: int | None
    step: int
    state_digest: str
    manifest: Claim
    anchor: Claim | None
    checkpoint: Claim | None
    coder: str
    changed_elements: int
    total_elements: int
    stored_bytes: int
    full_bytes: int
    published_us: int
    at: Position


class Reached(_Record, frozen=True, kw_only=True):
    """Of one lineage: which versions the data, or the version asked for, live on in."""

    lineage: str
    model: str
    trained: tuple[int, ...]  # made by steps that took it in; of a version asked for: itself
    carried: tuple[int, ...]  # these and every later one built on them
    left: tuple[
        tuple[int, int], ...
    ]  # (revert, version it went back to): from that one on it is not carried any more
    newest: int  # version of the lineage


class Serving(_Record, frozen=True, kw_only=True):
    """A replica served a version, for one stretch of time."""

    fleet: str
    replica: str
    version: int
    from_us: int
    until_us: int | None  # None = when it reported last
    at: Position


class Answer(_Record, frozen=True, kw_only=True):
    asked: str  # "version 12", "rollout <id>", "feedback <id>", "person <pseudonym>"
    focus: tuple[str, ...]  # rollout and feedback ids that were asked for
    lineage: str  # "" = none was reached
    model: str
    groups: tuple[GroupLine, ...]
    steps: tuple[StepLine, ...]
    versions: tuple[VersionLine, ...]  # that `steps` made; or the one asked for
    reached: tuple[Reached, ...]
    served: tuple[Serving, ...]
    way: tuple[WayStep, ...]  # to the version asked for, from its anchor
    line: tuple[
        int, ...
    ]  # the versions that the one asked for was made through, ascending; those abandoned are not in it
    decided_by: tuple[SettingsLine, ...]  # of the step that made the version asked for; by processor
    objects: tuple[Stored, ...]  # of the version asked for, and of the way to it
    report: Report

    @property
    def rollouts(self) -> tuple[RolloutLine, ...]:
        return tuple(one for group in self.groups for one in group.rollouts)
