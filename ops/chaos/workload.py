"""The known load: which groups there are, what must become of each, and when every event is written. Pure.

Everything follows from a `Workload`'s few numbers, so a producer that was killed goes on with the very same events,
and the verdict needs to ask nobody what was sent.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

import blake3
import msgspec
import numpy as np

from rollwire.schemas.reasons import Reason
from rollwire.schemas.records import Event, Reward, Rollout
from rollwire.streams import synthetic
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.log import Outgoing

SIZE: Final = 4  # rollouts of a group
MODEL: Final = "policy"
LINEAGE: Final = synthetic.LINEAGE
SOURCE: Final = "rollwire/chaos"

_SPREAD_S: Final = 1.5  # the rollouts of a group come within this after its opening
_REWARD_S: Final = (-0.2, 1.0)  # a reward, after its rollout; some overtake it
_LATE_S: Final = 3.0  # a late event, after its group's deadline
_TAIL_S: Final = 10.0  # after the last deadline that strikes, the load goes on at least this long
_SOON_S: Final = (0.02, 0.5)  # a repeat: while its group is open,
_AFTER_S: Final = (4.0, 12.0)  # or when it is closed,
_FORGOTTEN_S: Final = (1.0, 5.0)  # or behind the late horizon, when nobody remembers it
_FUTURE: Final = 1_000_000_000  # a version that is never published
_EIGHTH: Final = 0.125  # rewards are multiples of it, so that their sums are exact

Kind = Literal["trained", "equal", "unscored", "future", "no_reward", "late_reward", "late_rollout"]
# Shares of the groups; what is left is trained on. The last three strike at a deadline: they stand in the first part.
_SHARES: Final[dict[Kind, float]] = {
    "equal": 0.06, "unscored": 0.02, "future": 0.02, "no_reward": 0.03, "late_reward": 0.02, "late_rollout": 0.02,
}  # fmt: skip
_AT_DEADLINE: Final[frozenset[Kind]] = frozenset({"no_reward", "late_reward", "late_rollout"})
FATES: Final[dict[Kind, Reason]] = {
    "trained": "trained",
    "equal": "equal_rewards",
    "unscored": "unscorable",
    "future": "version_future",
    "no_reward": "incomplete",
    "late_reward": "incomplete",
    "late_rollout": "incomplete",
}
EMITTED: Final[frozenset[Kind]] = frozenset({"trained", "future"})  # `assemble` writes these to `groups`


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the load is made from."""

    seed: int
    groups: int
    rate: float  # rollouts a second
    begin_us: int  # when the first group is opened
    deadline_s: float  # `assemble`'s group deadline
    horizon_s: float  # `assemble`'s late horizon
    groups_per_step: int  # the trained groups are a multiple of it: no partial plan waits for ever
    repeats: float = 0.04  # share of the events that are written twice
    poison: float = 0.01  # records that are no events, for each rollout

    @property
    def duration_s(self) -> float:
        """From the opening of the first group to that of the last."""
        return self.groups * SIZE / self.rate


class Planned(NamedTuple):
    """One record of the timetable."""

    at_us: int
    number: int  # of its group, or of the poison
    member: int  # its index in the group
    what: Literal["rollout", "reward", "poison"]


class KnownMember(NamedTuple):
    rollout_id: str
    reward: float | None  # None = none came in time, or it could not be scored
    fingerprint: str  # of the rollout
    in_time: bool  # the rollout


class KnownGroup(NamedTuple):
    kind: Kind
    members: tuple[KnownMember, ...]  # by index


class Known(NamedTuple):
    """What must have come of the load."""

    groups: dict[str, KnownGroup]
    letters: dict[str, Reason]  # ids of records that must be refused -> why
    groups_per_step: int

    def groups_of(self, *kinds: Kind) -> int:
        return sum(group.kind in kinds for group in self.groups.values())

    @property
    def steps(self) -> int:
        return self.groups_of("trained") // self.groups_per_step

    @property
    def rollouts(self) -> int:
        return len(self.groups) * SIZE

    @property
    def reward_sum(self) -> float:
        """Over all members of trained groups; exact."""
        return sum(m.reward or 0.0 for g in self.groups.values() if g.kind == "trained" for m in g.members)


def kinds(load: Workload) -> list[Kind]:
    """What becomes of each group, by number."""
    draw = random.Random(load.seed)
    early = max(0.0, (load.duration_s - load.deadline_s - _LATE_S - _TAIL_S)) / max(load.duration_s, 1e-9)
    chosen: list[Kind] = ["trained"] * load.groups
    order = list(range(load.groups))
    draw.shuffle(order)
    for kind, share in _SHARES.items():
        last = load.groups * early if kind in _AT_DEADLINE else load.groups
        free = [n for n in order if chosen[n] == "trained" and n < last]
        for number in free[: round(load.groups * share)]:
            chosen[number] = kind
    left = [n for n in order if chosen[n] == "trained"]
    for number in left[: len(left) % load.groups_per_step]:
        chosen[number] = "equal"
    return chosen


def group_id(load: Workload, number: int) -> str:
    return synthetic.group_id(_opened_us(load, number), load.seed << 32 | number)


def rollout(load: Workload, kind: Kind, number: int, index: int) -> Rollout:
    draw = random.Random(f"{load.seed}/{number}/{index}")
    return synthetic.rollout(
        group_id(load, number),
        index,
        SIZE,
        at_us=_opened_us(load, number),
        prompt=draw.randint(2, 8),
        sampled=draw.randint(1, 16),
        version=_FUTURE if kind == "future" else 0,
        top_k=0,
        model=MODEL,
        seed=draw.randrange(1 << 30),
    )


def reward(load: Workload, kind: Kind, number: int, index: int) -> Reward:
    return synthetic.reward(
        group_id(load, number), index, _value(load, kind, number, index), at_us=_opened_us(load, number)
    )


def timetable(load: Workload) -> list[Planned]:
    """Every record of the load in the order of its time."""
    draw = random.Random(load.seed + 1)
    planned: list[Planned] = []
    deadline_us = round((load.deadline_s + _LATE_S) * 1e6)
    for number, kind in enumerate(kinds(load)):
        opened = _opened_us(load, number)
        for index in range(SIZE):
            last = index == SIZE - 1
            at = opened + round(draw.uniform(0, _SPREAD_S) * 1e6)
            scored = at + round(draw.uniform(*_REWARD_S) * 1e6)
            if last and kind == "late_rollout":
                at = opened + deadline_us
            if last and kind == "late_reward":
                scored = opened + deadline_us
            events: list[tuple[int, Literal["rollout", "reward"]]] = [(at, "rollout"), (scored, "reward")]
            if last and kind == "no_reward":
                events.pop()
            for time_us, what in events:
                planned.append(Planned(time_us, number, index, what))
                if draw.random() < load.repeats:
                    again = time_us + round(_repeat_after(load, draw, time_us) * 1e6)
                    planned.append(Planned(again, number, index, what))
    for number in range(round(load.groups * SIZE * load.poison)):
        at = load.begin_us + round(draw.uniform(0, load.duration_s) * 1e6)
        planned.append(Planned(at, number, 0, "poison"))
    planned.sort()
    return planned


def record_of(load: Workload, known_kinds: list[Kind], planned: Planned) -> Outgoing:
    """The record to write; the same bytes each time."""
    number, index = planned.number, planned.member
    if planned.what == "poison":
        return _poison(load, number)[0]
    kind = known_kinds[number]
    made: Event = (rollout if planned.what == "rollout" else reward)(load, kind, number, index)
    return outgoing(made, source=SOURCE, time_us=_opened_us(load, number))


def known(load: Workload) -> Known:
    """What must come of it. A rollout or a reward that comes after its group's deadline is refused as late."""
    groups: dict[str, KnownGroup] = {}
    letters: dict[str, Reason] = {}
    for number, kind in enumerate(kinds(load)):
        members: list[KnownMember] = []
        for index in range(SIZE):
            made, scored = rollout(load, kind, number, index), reward(load, kind, number, index)
            last = index == SIZE - 1
            in_time = not (last and kind == "late_rollout")
            value = None if last and kind in ("no_reward", "late_reward") else scored.reward
            members.append(KnownMember(made.rollout_id, value, fingerprint(made), in_time))
            if not in_time:
                letters[made.rollout_id] = "late"
            if last and kind == "late_reward":
                letters[_id_of(outgoing(scored, source=SOURCE, time_us=scored.scored_us))] = "late"
        group = group_id(load, number)
        groups[group] = KnownGroup(kind, tuple(members))
        if kind == "future":
            letters[group] = "version_future"
    for number in range(round(load.groups * SIZE * load.poison)):
        record, reason = _poison(load, number)
        letters[_id_of(record)] = reason
    return Known(groups, letters, load.groups_per_step)


def fingerprint(rollout: Rollout) -> str:
    """Tells two rollouts apart by all that they say."""
    return blake3.blake3(msgspec.msgpack.encode(rollout)).hexdigest(16)


def tag(headers: Mapping[str, bytes | None]) -> str:
    """The id that a record was given by whoever wrote it; "" = none."""
    return (headers.get("ce_id") or b"").decode(errors="replace")


def _repeat_after(load: Workload, draw: random.Random, time_us: int) -> float:
    """Seconds from an event to its repeat. One behind the horizon must not make the run longer."""
    which = draw.random()
    forgotten = load.horizon_s + draw.uniform(*_FORGOTTEN_S)
    if which < 0.1 and time_us + forgotten * 1e6 < load.begin_us + load.duration_s * 1e6:
        return forgotten
    return draw.uniform(*(_SOON_S if which < 0.5 else _AFTER_S))


def _opened_us(load: Workload, number: int) -> int:
    return load.begin_us + round(number * SIZE / load.rate * 1e6)


def _value(load: Workload, kind: Kind, number: int, index: int) -> float | None:
    draw = random.Random(f"{load.seed}/{number}")
    if kind == "unscored":
        return None
    if kind == "equal":
        return draw.randrange(8) * _EIGHTH
    # No two neighbours are equal, whatever is drawn.
    return (draw.randrange(8) + index) * _EIGHTH


def _id_of(record: Outgoing) -> str:
    return tag(dict(record.headers))


def _poison(load: Workload, number: int) -> tuple[Outgoing, Reason]:
    """The `number`-th record that is no event, and why it is refused."""
    draw = np.random.default_rng((load.seed, number))
    name = f"poison-{number}".encode()
    topic = ("rollouts", "rewards")[number % 2]
    good = outgoing(
        reward(load, "trained", number % load.groups, 0),
        source=SOURCE,
        time_us=_opened_us(load, number % load.groups),
    )
    headers = (("ce_id", name), *(header for header in good.headers if header[0] != "ce_id"))
    body = good.value or b""
    table: tuple[tuple[str, bytes | None, Reason], ...] = (
        (topic, b"\xc3\x01" + draw.bytes(200), "unknown_schema"),
        (topic, draw.bytes(40).replace(b"\xc3", b"x").replace(b"\x00", b"x"), "not_framed"),
        (topic, None, "tombstone_not_allowed"),
        ("rollouts", body, "wrong_schema"),
        ("rewards", body[:-3], "malformed"),
        ("rewards", body + b"more", "trailing_bytes"),
        ("rewards", body, "header_mismatch"),
    )
    topic, value, reason = table[number % len(table)]
    return Outgoing(topic, name, value, headers), reason
