"""Which version a request demands, and whether an answer gives it. Pure.

A demand is a minimum, an exact version, or both: headers `X-Rollwire-Min-Version`, `X-Rollwire-Version`, or the body's
`min_weight_version`, `exact_weight_version`, which the engine does not get to see. Versions are judged by what the engine calls its weights
and, after the fact, by the spans of `weight_versions`: a swap may come between the question and the last token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

MIN_HEADER: Final = "x-rollwire-min-version"
EXACT_HEADER: Final = "x-rollwire-version"
MIN_FIELD: Final = "min_weight_version"
EXACT_FIELD: Final = "exact_weight_version"
_DIGITS: Final = 18


class BadDemand(Exception):
    """A demand that says nothing: answered with 400."""


class Demand(NamedTuple):
    minimum: int | None = None
    exact: int | None = None

    @property
    def any(self) -> bool:
        return self.minimum is not None or self.exact is not None

    def met_by(self, label: str) -> bool:
        """Whether weights called `label` give what is demanded. A label that is no version gives nothing."""
        if not self.any:
            return True
        version = version_of(label)
        if version is None:
            return False
        return (self.exact is None or version == self.exact) and (
            self.minimum is None or version >= self.minimum
        )


class Conflict(NamedTuple):
    """A demand that is not met: answered with 409."""

    demand: Demand
    served: str  # what the engine calls its weights
    spans: tuple[dict[str, Any], ...] | None  # of the answer that is withheld; None = it was not asked for

    @property
    def message(self) -> str:
        wanted = [
            *([f"version {self.demand.exact}"] if self.demand.exact is not None else []),
            *([f"at least version {self.demand.minimum}"] if self.demand.minimum is not None else []),
        ]
        came = "" if self.spans is None else f"; the answer came from {format_spans(self.spans)}"
        return f"demanded is {' and '.join(wanted)}, served is {self.served!r}{came}"

    @property
    def may_come(self) -> bool:
        """Whether asking again later may help: versions go up."""
        version = version_of(self.served)
        wanted = [each for each in self.demand if each is not None]
        return version is None or version < max(wanted)


def version_of(label: str) -> int | None:
    """The version that a label names, None for a label of somebody else's."""
    return int(label) if label.isascii() and label.isdecimal() and len(label) <= _DIGITS else None


def take_demand(headers: Mapping[str, str], body: dict[str, Any]) -> tuple[Demand, dict[str, Any]]:
    """The demand, and the body without it. Raises `BadDemand` for what is no version, or for two that contradict."""
    rest = dict(body)
    minimum = _one(MIN_HEADER, headers.get(MIN_HEADER), MIN_FIELD, rest.pop(MIN_FIELD, None))
    exact = _one(EXACT_HEADER, headers.get(EXACT_HEADER), EXACT_FIELD, rest.pop(EXACT_FIELD, None))
    if minimum is not None and exact is not None and exact < minimum:
        raise BadDemand(f"version {exact} is demanded and at least {minimum}: no version is both")
    return Demand(minimum, exact), rest


def judge_start(demand: Demand, served: str) -> Conflict | None:
    return None if demand.met_by(served) else Conflict(demand, served, None)


def judge_answer(demand: Demand, served: str, spans: list[dict[str, Any]] | None) -> Conflict | None:
    """`spans` is None where the answer tells none: then a demand is not met."""
    if not demand.any or (
        spans is not None and all(demand.met_by(str(span.get("version"))) for span in spans)
    ):
        return None
    return Conflict(demand, served, tuple(spans or ()))


def spans_of_answer(answer: Any) -> list[dict[str, Any]] | None:
    """All spans of an answer, whichever engine gave it; None where one of its parts has none.

    vLLM tells them in each choice; SGLang in `meta_info` of each output of `/generate`, and in `metadata` of OpenAI's routes.
    """
    if isinstance(answer, list):
        parts = [spans_of_answer(each) for each in answer]
        return None if not parts or None in parts else [span for part in parts for span in part or ()]
    if not isinstance(answer, dict):
        return None
    for key in ("meta_info", "metadata"):
        if isinstance(told := answer.get(key), dict):
            return _spans(told.get("weight_versions"))
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        return None
    found = [
        _spans(choice.get("weight_versions") if isinstance(choice, dict) else None) for choice in choices
    ]
    return None if None in found else [span for part in found for span in part or ()]


def format_spans(spans: list[dict[str, Any]] | tuple[dict[str, Any], ...]) -> str:
    """`12:0-5,13:5-9`: version, first token, the one behind the last."""
    return ",".join(f"{span.get('version')}:{span.get('start')}-{span.get('end')}" for span in spans)


def _spans(told: Any) -> list[dict[str, Any]] | None:
    if not isinstance(told, list) or not all(isinstance(span, dict) for span in told):
        return None
    return told


def _one(header: str, in_header: str | None, field: str, in_body: Any) -> int | None:
    """One value, of header or body. Raises `BadDemand`."""
    found: list[int] = []
    if in_header is not None:
        version = version_of(in_header.strip())
        if version is None:
            raise BadDemand(f"{header}: {in_header[:40]!r} is no version")
        found.append(version)
    if in_body is not None:
        version = (
            in_body if type(in_body) is int else version_of(in_body) if isinstance(in_body, str) else None
        )
        if version is None or version < 0:
            raise BadDemand(f"{field}: {str(in_body)[:40]!r} is no version")
        found.append(version)
    if len(set(found)) > 1:
        raise BadDemand(f"{header} says {found[0]} and {field} {found[1]}")
    return found[0] if found else None
