"""What may be said: one event's signal, value and label against the rules."""

from __future__ import annotations

import difflib
import math
import re
from typing import Final

from rollwire.schemas.errors import Refused
from rollwire.schemas.rules.types import Rules

_WORD: Final = re.compile(r"[\w.:-]{1,64}")


def check_value(rules: Rules, signal: str, value: float | None, label: str | None) -> float | None:
    """The number that an event says; None for a text.

    Raises `Refused` with the field that is wrong: `unknown_signal`, `value_missing`, `not_finite`, `value_out_of_range`,
    `label_unknown`, `inconsistent` (value and label disagree, or a text with a value). Both ends of a range are allowed;
    nothing is clamped or rounded (C72).
    """
    known = rules.signals.get(signal)
    if known is None:
        near = difflib.get_close_matches(signal[:80], rules.signals, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(rules.signals)}"
        raise Refused("unknown_signal", f"signal {signal[:80]!r} is not in the rules; {hint}", field="signal")
    if label is not None and not known.labels and _WORD.fullmatch(label) is None:
        raise Refused(
            "label_unknown",
            f"a label of {signal!r} is one word of at most 64 characters: it is kept unsealed; say more in the comment",
            field="label",
        )
    if known.kind == "text":
        if value is not None:
            raise Refused("inconsistent", f"signal {signal!r} is a text and takes no value", field="value")
        return None
    named: float | None = None
    if label is not None and known.labels:
        named = known.labels.get(label)
        if named is None:
            raise Refused(
                "label_unknown",
                f"label {label[:80]!r} of {signal!r} is none of {', '.join(known.labels)}",
                field="label",
            )
    if value is None:
        if named is None:
            field = "value" if label is None else "label"
            raise Refused("value_missing", f"signal {signal!r} needs a value", field=field)
        return named
    if not math.isfinite(value):
        raise Refused("not_finite", f"value {value} of {signal!r}", field="value")
    low, high = known.range or (0.0, 1.0)
    if not low <= value <= high:
        raise Refused(
            "value_out_of_range",
            f"value {value!r} of {signal!r} is outside [{low:g}, {high:g}]",
            field="value",
        )
    if known.values and value not in known.values:
        allowed = ", ".join(f"{one:g}" for one in known.values)
        raise Refused(
            "value_out_of_range", f"value {value!r} of {signal!r} is none of {allowed}", field="value"
        )
    if named is not None and named != value:
        raise Refused(
            "inconsistent",
            f"label {label!r} of {signal!r} stands for {named:g}, value is {value!r}",
            field="label",
        )
    return value
