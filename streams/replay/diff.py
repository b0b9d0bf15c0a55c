"""Two outcomes of one history, compared: what became of each group, what rewards were given, what was planned. Pure but for `outcomes`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from rollwire.schemas.errors import Refused
from rollwire.schemas.ids import opened_us
from rollwire.schemas.records import Group, GroupFate, Notice, PackedBatch, Reward
from rollwire.streams.assemble_config import LIVE, SAMPLED
from rollwire.streams.emit import decode_record
from rollwire.streams.pack_step import NAME as PACK
from rollwire.streams.replay.audit import ATTRIBUTE
from rollwire.streams.replay.audit_join import decided_by
from rollwire.streams.replay.window import EVER_US
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.scan import scan

NOTICE: Final = "replay"
"""Name of the notice that a replay begins its shadow topics with."""

ALL: Final = frozenset({ATTRIBUTE, SAMPLED.name, LIVE.name, PACK})
_TOPICS: Final = ("notices", "groups", "group-fates", "rewards", "packed-batches")


class Scope(NamedTuple):
    """What a log says anew: processors, and the window of the groups that they were run over."""

    processors: frozenset[str] = ALL
    from_us: int = 0
    to_us: int = EVER_US

    def both(self, other: Scope) -> Scope:
        return Scope(
            self.processors & other.processors,
            max(self.from_us, other.from_us),
            min(self.to_us, other.to_us),
        )

    def holds(self, group_id: str, decided_us: int) -> bool:
        """Whether a group was opened within, and met its fate before the end."""
        try:
            return self.from_us <= opened_us(group_id) and decided_us < self.to_us
        except Refused:
            return False


class Fate(NamedTuple):
    decided_by: str
    fate: str
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.fate}: {self.reason}, by {self.decided_by}"
            if self.reason
            else f"{self.fate}, by {self.decided_by}"
        )


class Plan(NamedTuple):
    """Of one step, over all ranks."""

    digest: str
    group_ids: tuple[str, ...]
    sequences: int
    tokens: int


class Outcomes:
    """What one log says became of its groups."""

    def __init__(self) -> None:
        self.scope = Scope()
        # Each with the moment at which it was decided.
        self.joined: dict[str, tuple[int, Fate]] = {}  # what a join made of each group
        self.packed: dict[str, tuple[int, Fate]] = {}  # and what `pack` made of those that it got
        self.rewards: dict[str, tuple[int, float | None]] = {}  # that feedback earned, by rollout
        self.plans: dict[int, tuple[int, Plan]] = {}

    def add(self, event: object) -> None:
        match event:
            case Notice() if event.name == NOTICE:
                said = event.attributes
                self.scope = Scope(
                    frozenset(said["processors"].split(",")), int(said["from_us"]), int(said["to_us"])
                )
            case Group():
                fate = Fate(decided_by(event) or "", "group", "")
                self.joined.setdefault(event.group_id, (event.cut.clock_us, fate))
            case GroupFate():
                fates = self.packed if event.decided_by == PACK else self.joined
                fate = Fate(event.decided_by, event.fate, event.reason)
                fates.setdefault(event.group_id, (event.cut.clock_us, fate))
            case Reward() if event.source == "user":
                self.rewards.setdefault(event.rollout_id, (event.scored_us, event.reward))
            case PackedBatch() if event.rank == 0:
                plan = Plan(event.plan_digest, event.group_ids, event.total_sequences, event.total_tokens)
                self.plans[event.step] = event.cut.clock_us, plan
            case _:
                pass


def outcomes(log: Log) -> Outcomes:
    """Reads them once. What does not decode says nothing."""
    found = Outcomes()
    for record in scan(log, _TOPICS, lost=lambda _: None):
        try:
            found.add(decode_record(record))
        except Refused:
            continue
    return found


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """How many groups met one fate in each."""

    decided_by: str
    fate: str
    reason: str
    a: int
    b: int


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """A group that met another fate, or a rollout with another reward."""

    id: str
    a: str
    b: str


class PlansDiff(msgspec.Struct, frozen=True, kw_only=True):
    a: int
    b: int
    same_groups: int  # with the same groups in the same order
    same: int  # of the same digest: the same layout and limits too
    sequences_a: int
    sequences_b: int
    tokens_a: int
    tokens_b: int
    first: int | None  # step that has other groups, or is planned in one of them only


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """`kept`: groups that a plan took, in a, in b, in both. `moved` and `rescored` name every single difference."""

    processors: tuple[str, ...]  # that both ran: nothing else is compared
    kept_a: int
    kept_b: int
    kept_both: int
    rows: tuple[Row, ...]
    moved: tuple[Moved, ...]
    rewards_a: int
    rewards_b: int
    reward_mean_a: float | None
    reward_mean_b: float | None
    rescored: tuple[Moved, ...]
    plans: PlansDiff | None

    @property
    def equal(self) -> bool:
        plans = self.plans
        same = plans is None or plans.a == plans.b == plans.same
        return not self.moved and not self.rescored and same


def compare(a: Outcomes, b: Outcomes) -> Diff:
    """What the processors that both ran came to, for the groups that both were run over."""
    scope = a.scope.both(b.scope)
    fates_a, fates_b = _fates(a, scope), _fates(b, scope)
    given_a, given_b = _given(a, scope), _given(b, scope)
    kept_a = {name for (by, name), fate in fates_a.items() if by == PACK and fate.fate == "kept"}
    kept_b = {name for (by, name), fate in fates_b.items() if by == PACK and fate.fate == "kept"}
    return Diff(
        processors=tuple(sorted(scope.processors)),
        kept_a=len(kept_a),
        kept_b=len(kept_b),
        kept_both=len(kept_a & kept_b),
        rows=_rows(fates_a.values(), fates_b.values()),
        moved=tuple(
            Moved(id=key[1], a=str(fates_a.get(key, "none")), b=str(fates_b.get(key, "none")))
            for key in sorted(fates_a.keys() | fates_b.keys())
            if fates_a.get(key) != fates_b.get(key)
        ),
        rewards_a=len(given_a),
        rewards_b=len(given_b),
        reward_mean_a=_mean(given_a.values()),
        reward_mean_b=_mean(given_b.values()),
        rescored=tuple(
            Moved(id=i, a=_reward(given_a, i), b=_reward(given_b, i))
            for i in sorted(given_a.keys() | given_b.keys())
            if _reward(given_a, i) != _reward(given_b, i)
        ),
        plans=_plans(_planned(a, scope), _planned(b, scope)) if PACK in scope.processors else None,
    )


def _fates(found: Outcomes, scope: Scope) -> dict[tuple[str, str], Fate]:
    """(processor kind, group) -> fate. What a join made and what `pack` made of it are two facts."""
    joins = scope.processors & {SAMPLED.name, LIVE.name}
    named = [("join", n, at, f) for n, (at, f) in found.joined.items() if f.decided_by in joins]
    if PACK in scope.processors:
        named += [(PACK, n, at, f) for n, (at, f) in found.packed.items()]
    return {(kind, name): fate for kind, name, at, fate in named if scope.holds(name, at)}


def _given(found: Outcomes, scope: Scope) -> dict[str, float | None]:
    if ATTRIBUTE not in scope.processors:
        return {}
    return {i: r for i, (at, r) in found.rewards.items() if scope.holds(i.rpartition(".")[0], at)}


def _planned(found: Outcomes, scope: Scope) -> dict[int, Plan]:
    return {step: plan for step, (at, plan) in found.plans.items() if scope.from_us <= at < scope.to_us}


def _rows(a: Iterable[Fate], b: Iterable[Fate]) -> tuple[Row, ...]:
    counts_a, counts_b = Counter(a), Counter(b)
    return tuple(
        Row(decided_by=f.decided_by, fate=f.fate, reason=f.reason, a=counts_a[f], b=counts_b[f])
        for f in sorted(counts_a.keys() | counts_b.keys())
    )


def _plans(a: dict[int, Plan], b: dict[int, Plan]) -> PlansDiff:
    steps = sorted(a.keys() | b.keys())
    both = [(a[step], b[step]) for step in steps if step in a and step in b]
    other = [s for s in steps if s not in a or s not in b or a[s].group_ids != b[s].group_ids]
    return PlansDiff(
        a=len(a),
        b=len(b),
        same_groups=len(steps) - len(other),
        same=sum(one.digest == two.digest for one, two in both),
        sequences_a=sum(plan.sequences for plan in a.values()),
        sequences_b=sum(plan.sequences for plan in b.values()),
        tokens_a=sum(plan.tokens for plan in a.values()),
        tokens_b=sum(plan.tokens for plan in b.values()),
        first=other[0] if other else None,
    )


def _reward(given: dict[str, float | None], rollout_id: str) -> str:
    return str(given[rollout_id]) if rollout_id in given else "none"


def _mean(rewards: Iterable[float | None]) -> float | None:
    scored: Sequence[float] = [reward for reward in rewards if reward is not None]
    return sum(scored) / len(scored) if scored else None
