"""A rules file as `Rules`. Whatever is not said plainly is an error that names the place and the nearest right key."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from typing import Any, Final

import msgspec

from rollwire.schemas.errors import ConfigError
from rollwire.schemas.rules.types import BOOLEAN, Outcome, Rules, Signal

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
_VERSION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MOST_EVENTS: Final = 10_000  # ids of 128 characters: still far below what `rewards` takes


def parse_rules(text: str, where: str = "rules") -> Rules:
    """The rules of a TOML text; `where` names it in errors. Raises `ConfigError`.

    A number signal without a range is an error: what may be said is never "anything" (C72).
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not TOML: {error}") from error
    _keys(where, table, Rules.__struct_fields__)
    for section, kind in (("signals", Signal), ("outcomes", Outcome)):
        entries = table.get(section, {})
        if not isinstance(entries, dict):
            raise ConfigError(f"{where}: {section} must be a table")
        for name, entry in entries.items():
            place = f"{where}: [{section}.{name}]"
            if not _NAME.fullmatch(name):
                raise ConfigError(f"{place}: names are lower-case words joined by '_', at most 64 characters")
            if not isinstance(entry, dict):
                raise ConfigError(f"{place}: must be a table")
            _keys(place, entry, kind.__struct_fields__)
    try:
        rules = msgspec.convert(table, Rules)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error
    _check(rules, where)
    signals = {
        name: _checked(signal, rules, f"{where}: [signals.{name}]") for name, signal in rules.signals.items()
    }
    return msgspec.structs.replace(rules, signals=signals)


@cache
def default_text() -> str:
    return (resources.files("rollwire.schemas") / "rules" / "default.toml").read_text("utf-8")


@cache
def default_rules() -> Rules:
    """The rules that hold where none are given."""
    return parse_rules(default_text(), "schemas/rules/default.toml")


def _keys(where: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}")


def _check(rules: Rules, where: str) -> None:
    for name in ("name", "version"):
        if not _VERSION.fullmatch(getattr(rules, name)):
            raise ConfigError(f"{where}: {name} {getattr(rules, name)!r} has odd characters, or too many")
    _ordered(f"{where}: reward", rules.reward)
    if not 0 < rules.window_s <= rules.horizon_s < 1e9:
        raise ConfigError(f"{where}: window_s must be positive and at most horizon_s, and that below 1e9")
    if not 0 < rules.grace_s < 1e9:
        raise ConfigError(f"{where}: grace_s must be positive and below 1e9")
    if not 1 <= rules.max_events <= _MOST_EVENTS:
        raise ConfigError(f"{where}: max_events must be between 1 and {_MOST_EVENTS}")
    if not rules.signals:
        raise ConfigError(f"{where}: there are no signals")
    for name, outcome in rules.outcomes.items():
        _inside(f"{where}: [outcomes.{name}] silent", outcome.silent, rules.reward)


def _checked(signal: Signal, rules: Rules, where: str) -> Signal:
    """The signal with what its kind implies."""
    if signal.kind == "text":
        if signal.range or signal.values or signal.labels or signal.worth or signal.weight:
            raise ConfigError(f"{where}: a text has neither range, values, labels, worth nor weight")
        return signal
    if signal.kind == "boolean":
        if signal.range not in (None, (0.0, 1.0)):
            raise ConfigError(f"{where}: the range of a boolean is [0, 1]; leave it out")
        signal = msgspec.structs.replace(
            signal, range=(0.0, 1.0), values=(0.0, 1.0), labels={**BOOLEAN, **signal.labels}
        )
    if signal.range is None:
        raise ConfigError(f"{where}: a number needs a range = [lowest, highest], both allowed")
    if signal.fold in ("any", "all") and signal.kind != "boolean":
        raise ConfigError(f"{where}: fold {signal.fold!r} is for booleans")
    _ordered(f"{where}: range", signal.range)
    for value in signal.values:
        _inside(f"{where}: values", value, signal.range)
    for label, value in signal.labels.items():
        _inside(f"{where}: label {label!r}", value, signal.range)
        if signal.values and value not in signal.values:
            raise ConfigError(f"{where}: label {label!r} stands for {value}, which is not one of values")
    if not (math.isfinite(signal.weight) and signal.weight >= 0):
        raise ConfigError(f"{where}: weight must be 0 or more")
    if signal.weight > 0 and signal.worth is None:
        raise ConfigError(f"{where}: a weight needs a worth = [at the range's low end, at its high end]")
    for worth in signal.worth or ():
        _inside(f"{where}: worth", worth, rules.reward)
    return signal


def _ordered(where: str, ends: tuple[float, float]) -> None:
    if not (math.isfinite(ends[0]) and math.isfinite(ends[1]) and ends[0] < ends[1]):
        raise ConfigError(f"{where}: {list(ends)} must be two finite numbers, the lower one first")


def _inside(where: str, value: float, ends: tuple[float, float]) -> None:
    if not ends[0] <= value <= ends[1]:
        raise ConfigError(f"{where}: {value} is outside {list(ends)}")
