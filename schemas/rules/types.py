"""The rules as frozen records."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import Final, Literal

import msgspec

Kind = Literal["number", "boolean", "text"]
Fold = Literal["last", "first", "any", "all", "mean", "min", "max"]


class Signal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What people, or a product on their behalf, may say about a rollout."""

    kind: Kind
    range: tuple[float, float] | None = None  # both ends allowed; a boolean's is (0, 1)
    values: tuple[float, ...] = ()  # only these; () = the whole range
    labels: dict[str, float] = {}  # word -> the number that it stands for
    fold: Fold = "last"
    worth: tuple[float, float] | None = None  # as reward, at the range's ends; None = counted and shown only
    weight: float = 0.0
    alone: bool = True

    @property
    def scored(self) -> bool:
        """Whether it is part of a reward."""
        return self.worth is not None and self.weight > 0

    def worth_of(self, value: float) -> float:
        """A value of the range as reward. Of a scored signal only."""
        if self.worth is None or self.range is None:
            raise ValueError("a signal without worth has no reward")
        (low, high), (at_low, at_high) = self.range, self.worth
        share = (value - low) / (high - low)
        return at_low * (1.0 - share) + at_high * share


class Outcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A class of what happened in live traffic."""

    silent: float  # the reward of a rollout that nobody said anything about


class Rules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A rules file, checked. Build it by `parse_rules`; times are seconds."""

    name: str
    version: str
    window_s: float
    grace_s: float
    horizon_s: float
    max_events: int
    reward: tuple[float, float]
    signals: dict[str, Signal]
    outcomes: dict[str, Outcome] = {}

    @cached_property
    def digest(self) -> str:
        """SHA-256, hex, of what the rules say; comments and spaces of the file are not part of it."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()

    @cached_property
    def verifier_version(self) -> str:
        """What a reward by these rules names as its verifier's version."""
        return f"{self.version}+{self.digest[:12]}"

    @cached_property
    def window_us(self) -> int:
        return round(self.window_s * 1e6)

    @cached_property
    def grace_us(self) -> int:
        return round(self.grace_s * 1e6)

    @cached_property
    def horizon_us(self) -> int:
        return round(self.horizon_s * 1e6)

    def silent(self, outcome: str) -> float | None:
        """What silence about a rollout of this class is worth; None = it is not scored."""
        found = self.outcomes.get(outcome)
        return None if found is None else found.silent


BOOLEAN: Final[Mapping[str, float]] = {"true": 1.0, "false": 0.0}
"""Labels that every boolean signal knows."""
