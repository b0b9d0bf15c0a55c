"""How groups are joined: what both kinds of groups have in common, and what sampling for training and live traffic differ in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollwire.kernels.advantages import Baseline
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import Refused
from rollwire.schemas.records import Cut, Event, Group, GroupClosed, GroupFate, ProductionGroupClosed, Reward
from rollwire.streams.assemble_answer import OpenAnswer
from rollwire.streams.assemble_group import OpenGroup
from rollwire.streams.seams.log import Record

REWARDS: Final = "rewards"


class Kind(NamedTuple):
    """One kind of groups, and the instance of `assemble` that joins it: its own ids on the broker, its own marks."""

    name: str
    joined: tuple[str, ...]  # the rollouts' topic first
    closed: str  # changelog
    mark: type[GroupClosed]
    live: bool

    def passes_by(self, record: Record, event: Event | Refused) -> bool:
        """Whether a record of `rewards`, which both read, is the other kind's: what people said is of live traffic, all
        else of what was sampled for training. Of what is refused its headers tell, so that it is refused once."""
        said = event.source == "user" if isinstance(event, Reward) else _says_user(record)
        return said is not self.live

    def open_group(self, group_id: str, deadline_us: int) -> OpenGroup:
        return OpenAnswer(group_id, deadline_us) if self.live else OpenGroup(group_id, deadline_us)


SAMPLED: Final = Kind(
    "assemble", ("rollouts", REWARDS, "routing-traces"), "groups-closed", GroupClosed, live=False
)
LIVE: Final = Kind(
    "assemble-production",
    ("production-rollouts", REWARDS),
    "production-groups-closed",
    ProductionGroupClosed,
    live=True,
)


def _says_user(record: Record) -> bool:
    """By the id of a reward: `<rollout id>/<source>/...`."""
    identity = next((value for name, value in record.headers if name == "ce_id"), None)
    return identity is not None and identity.split(b"/", 2)[1:2] == [b"user"]


class JoinConfig(BaseModel, ABC):
    """What joining takes, whatever is joined."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: ClassVar[Kind]

    group_deadline_s: float = Field(
        default=60.0,
        gt=0,
        description="From the opening of a group (its UUIDv7) to the last moment an event counts.",
    )
    late_horizon_s: float = Field(
        default=3600.0,
        gt=0,
        description="Closed groups are remembered this long; older events are late without a look-up.",
    )
    grace_s: float = Field(
        default=1.0,
        ge=0,
        description="A deadline strikes this much later: open transactions may hide events that are in time.",
    )
    ahead_s: float = Field(
        default=60.0,
        gt=0,
        description="A group opened further in the future than this (a wrong clock) is refused.",
    )

    @property
    def traced(self) -> bool:
        """Whether routing traces are waited for."""
        return False

    @property
    def topics(self) -> tuple[str, ...]:
        """The inputs."""
        return self.kind.joined

    @abstractmethod
    def decide(self, group: OpenGroup, cut: Cut) -> Group | GroupFate:
        """What becomes of a group that is whole, or due."""

    @model_validator(mode="after")
    def _horizon_holds_the_deadline(self) -> JoinConfig:
        if self.late_horizon_s < self.group_deadline_s:
            raise ValueError(
                f"late_horizon_s={self.late_horizon_s:g} is shorter than group_deadline_s={self.group_deadline_s:g}: "
                "closed groups would be forgotten while their events still count"
            )
        closed = self.kind.closed
        kept_s = TOPICS[closed].retention_ms / 1e3
        if 0 <= kept_s <= self.late_horizon_s:
            raise ValueError(
                f"late_horizon_s={self.late_horizon_s:g} is not shorter than the {kept_s:g} s that {closed} is kept: a "
                f"restart would open closed groups again; raise retention_ms in schemas/topics/{closed}.toml first"
            )
        return self


class AssembleConfig(JoinConfig):
    """How groups that were sampled for training are joined."""

    kind: ClassVar[Kind] = SAMPLED

    baseline: Baseline = Field(
        default="mean", description="What is subtracted from a reward: the group's mean, or the others'."
    )
    equal_rewards: Literal["filter", "keep"] = Field(
        default="filter",
        description="A group whose rewards are all equal teaches nothing: filter it, or keep it with advantages of 0.",
    )
    require_traces: bool = Field(
        default=True,
        description="A rollout that says that its routes were recorded waits for its routing trace.",
    )
    incomplete: Literal["drop", "close_partial"] = Field(
        default="drop",
        description="At the deadline: drop what is not whole, or train on the members that are.",
    )

    @property
    def traced(self) -> bool:
        return self.require_traces

    @property
    def topics(self) -> tuple[str, ...]:
        return self.kind.joined if self.require_traces else self.kind.joined[:2]

    def decide(self, group: OpenGroup, cut: Cut) -> Group | GroupFate:
        return group.decide(
            cut,
            baseline=self.baseline,
            keep_equal=self.equal_rewards == "keep",
            traces=self.require_traces,
            partial=self.incomplete == "close_partial",
        )


class ProductionConfig(JoinConfig):
    """How answers of live traffic are joined with the rewards that people's feedback earned them.

    Feedback has a window, at whose end an answer gets its one reward, be it that nobody said anything: the deadline must
    lie behind that window.
    """

    kind: ClassVar[Kind] = LIVE

    group_deadline_s: float = Field(
        default=7_200.0,
        gt=0,
        description="From the opening of a group (its UUIDv7) to the last moment its reward counts: longer than the "
        "feedback's window and grace.",
    )
    late_horizon_s: float = Field(
        default=86_400.0,
        gt=0,
        description="Closed groups are remembered this long; older events are late without a look-up.",
    )
    unjudged: Literal["drop", "silent"] = Field(
        default="drop",
        description="An answer without a reward event at the deadline (nobody judged its feedback): drop it, or take it "
        "for one of which nobody said anything.",
    )

    def decide(self, group: OpenGroup, cut: Cut) -> Group | GroupFate:
        return group.decide(
            cut, baseline="mean", keep_equal=True, traces=False, partial=self.unjudged == "silent"
        )
