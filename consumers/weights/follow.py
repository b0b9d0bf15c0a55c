"""Which version a replica is to serve: the newest, a fixed one, or what a channel's last promotion names.

A promotion onto the replica's own channel, `<fleet>/<replica>`, comes before whatever it was told to follow: that is how
one replica is pinned while it runs. Version -1 there takes the word back.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollwire.schemas.records import Evaluation, Event, Promotion, WeightLink, WeightVersion

NO_VERSION: Final = -1
NEAR: Final = 256
"""Four times the longest span of a link: versions beyond the ends that a way may lead over."""


class FollowConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["latest", "pinned", "channel"] = Field(
        default="latest", description="The newest version, a fixed one, or the one a channel was promoted to."
    )
    version: int | None = Field(default=None, ge=0, description="pinned: the version.")
    channel: str = Field(default="", description="channel: its name.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.mode == "pinned") != (self.version is not None):
            raise ValueError("`version` goes with mode 'pinned', and only with it")
        if (self.mode == "channel") != bool(self.channel):
            raise ValueError("`channel` goes with mode 'channel', and only with it")
        return self


def own_channel(fleet: str, replica: str) -> str:
    """The channel that nobody but this replica follows."""
    return f"{fleet}/{replica}"


def promotion(
    version: int,
    channel: str,
    *,
    model: str,
    lineage: str,
    by: str,
    at_us: int,
    reason: str = "",
    replica: str = "rollwire-fleet",
) -> Evaluation:
    """Word that the followers of `channel` are to serve `version` from now on; it is an evaluation without scores."""
    return Evaluation(
        model=model,
        lineage=lineage,
        suite="",
        version=version,
        scores=(),
        tasks=0,
        samples_per_task=0,
        replica=replica,
        at_us=at_us,
        promotion=Promotion(channel=channel, by=by, reason=reason),
    )


class Wanted(NamedTuple):
    """What is to be served. `event` is None where nothing is, or where that version is not published (yet)."""

    lineage: str | None
    version: int  # NO_VERSION = nothing was said
    event: WeightVersion | None
    channel: str  # of the promotion that said so; "" = none did


class Promoted(NamedTuple):
    lineage: str
    version: int


class Follow:
    """Folds `weight-versions`, `weight-links` and `evaluations`; answers what is wanted and what ways there are.

    `lineage=None`: the lineage that was started last, unless a promotion names another. With one, promotions of others are
    none of its business. Repeats change nothing.
    """

    def __init__(
        self, config: FollowConfig, *, own: str, lineage: str | None = None, model: str | None = None
    ) -> None:
        self._config = config
        self._own = own
        self._fixed = lineage
        self._lineage = lineage
        self._model = model
        self._versions: dict[str, dict[int, WeightVersion]] = {}
        self._newest: dict[str, int] = {}
        self._links: dict[
            str, dict[int, list[WeightLink]]
        ] = {}  # by the version that they give, in the log's order
        self._seen: set[WeightLink | Evaluation] = set()
        self._channels: dict[str, Promoted] = {}

    @property
    def lineage(self) -> str | None:
        """The one that is followed where no promotion says otherwise."""
        return self._lineage

    def add(self, event: Event) -> bool:
        """Whether the event was news."""
        match event:
            case WeightVersion() if self._of_model(event.model):
                return self._version(event)
            case WeightLink() if self._of_model(event.model):
                if not self._first_time(event):
                    return False
                self._links.setdefault(event.lineage, {}).setdefault(event.version, []).append(event)
                return True
            case Evaluation() if event.promotion is not None and self._of_model(event.model):
                if self._fixed not in (None, event.lineage) and event.version != NO_VERSION:
                    return False
                return self._first_time(event) and self._promotion(event, event.promotion.channel)
            case _:
                return False

    def wanted(self) -> Wanted:
        for channel in (self._own, self._config.channel):
            promoted = self._channels.get(channel)
            if promoted is not None:
                return self._known(promoted.lineage, promoted.version, channel)
        if self._config.mode == "channel" or self._lineage is None:
            return Wanted(self._lineage, NO_VERSION, None, self._config.channel)
        if self._config.version is not None:
            return self._known(self._lineage, self._config.version, "")
        return self._known(self._lineage, self._newest.get(self._lineage, NO_VERSION), "")

    def events(self, lineage: str) -> list[WeightVersion]:
        return list(self._versions.get(lineage, {}).values())

    def links(self, lineage: str) -> list[WeightLink]:
        """Those between the same two versions in the log's order."""
        return [link for links in self._links.get(lineage, {}).values() for link in links]

    def near(self, lineage: str, have: int | None, want: int) -> tuple[list[WeightVersion], list[WeightLink]]:
        """Versions and links from `NEAR` below to `NEAR` above both ends: where the cheapest way lies unless it is very odd.

        A lineage grows for ever, and a way is planned for every version.
        """
        low = min(want, want if have is None else have) - NEAR
        high = max(want, want if have is None else have) + NEAR
        known, links = self._versions.get(lineage, {}), self._links.get(lineage, {})
        versions = [known[v] for v in range(max(low, 0), high + 1) if v in known]
        return versions, [link for event in versions for link in links.get(event.version, ())]

    def event(self, lineage: str, version: int) -> WeightVersion | None:
        return self._versions.get(lineage, {}).get(version)

    def with_digest(self, state_digest: str, said: tuple[str, int, str] | None) -> WeightVersion | None:
        """A version of this state: the one that is `said` (lineage, version, ...) if it is one, else the newest of the
        followed lineage."""
        if said is not None:
            event = self.event(said[0], said[1])
            if event is not None and event.state_digest == state_digest:
                return event
        of_lineage = self._versions.get(self._lineage or "", {})
        same = [version for version, event in of_lineage.items() if event.state_digest == state_digest]
        return of_lineage[max(same)] if same else None

    def _first_time(self, event: WeightLink | Evaluation) -> bool:
        """After trouble with the log its topics are read anew."""
        if event in self._seen:
            return False
        self._seen.add(event)
        return True

    def _of_model(self, model: str) -> bool:
        return self._model is None or model == self._model

    def _known(self, lineage: str, version: int, channel: str) -> Wanted:
        return Wanted(lineage, version, self.event(lineage, version), channel)

    def _version(self, event: WeightVersion) -> bool:
        if event.lineage not in self._versions:
            self._versions[event.lineage] = {}
            if self._fixed is None:  # started last, so far
                self._lineage = event.lineage
        of_lineage = self._versions[event.lineage]
        if event.version in of_lineage:
            return False
        of_lineage[event.version] = event
        self._newest[event.lineage] = max(event.version, self._newest.get(event.lineage, NO_VERSION))
        return True

    def _promotion(self, event: Evaluation, channel: str) -> bool:
        """The last one in the log counts, also where it names an older version."""
        before = self._channels.get(channel)
        if event.version == NO_VERSION:
            self._channels.pop(channel, None)
            return before is not None
        self._channels[channel] = Promoted(event.lineage, event.version)
        return True
