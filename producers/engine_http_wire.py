"""What both servers' answers have in common, read strictly: nothing is padded, cut or guessed (law 10). Pure.

N sampled tokens, P prompt tokens, R rows of routes, L MoE layers, K experts a token
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rollwire.schemas.errors import EngineRefused
from rollwire.streams.seams.engine import Sampled, SampleRequest

_REASONS: Final = ("stop", "length", "abort")


class Call(NamedTuple):
    path: str
    body: dict[str, Any]


class Wire(Protocol):
    """One server's language."""

    def check(self, request: SampleRequest) -> None:
        """Raises `ConfigError` for what this server, as it is set up, would not sample truly."""
        ...

    def generate(self, request: SampleRequest, wire_id: str, label: str) -> Call:
        """`wire_id` names the request to the server; `label` is what the weights are called now."""
        ...

    def read(self, request: SampleRequest, answer: Any, versions: Collection[int]) -> Sampled:
        """Raises `EngineRefused` for an answer that is not whole, `UnknownWeights` for tokens of other weights."""
        ...

    def aborts(self, wire_ids: Sequence[str]) -> list[Call]:
        """The calls that end these requests."""
        ...


class UnknownWeights(Exception):
    """Tokens were sampled by weights that this process did not put there: the server was started anew, perhaps."""


def at(answer: Any, *path: str | int) -> Any:
    """The value at a path. Raises `EngineRefused` where there is none."""
    value = answer
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            raise EngineRefused(f"an engine's answer has nothing at {path}: {str(answer)[:300]}") from None
    return value


def token_array(values: Any) -> NDArray[np.int64]:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise EngineRefused(f"an engine's token ids are {str(values)[:200]}")
    return np.array(values, np.int64)


def logprob_array(pairs: Sequence[tuple[Any, Any]], tokens_N: NDArray[np.int64]) -> NDArray[np.float32]:
    """From (token id, logprob) pairs, which must be those of the sampled tokens."""
    if [pair[0] for pair in pairs] != tokens_N.tolist():
        raise EngineRefused(f"an engine's {len(pairs)} logprobs are not those of its {tokens_N.size} tokens")
    if not all(isinstance(pair[1], float | int) and not isinstance(pair[1], bool) for pair in pairs):
        raise EngineRefused("an engine's logprobs are no numbers")
    return np.array([pair[1] for pair in pairs], np.float32)


def version_array(spans: Any, count: int, versions: Collection[int]) -> NDArray[np.int64]:
    """[N] from `weight_versions`, which must cover [0, count) in order and without a hole.

    Raises `UnknownWeights` for a label that is none of `versions`.
    """
    versions_N = np.empty(count, np.int64)
    end = 0
    for span in spans if isinstance(spans, list) else []:
        label, start, upto = at(span, "version"), at(span, "start"), at(span, "end")
        if start != end or not isinstance(upto, int) or not start <= upto <= count:
            break
        if start == upto:  # of a request that sampled nothing
            continue
        if not (isinstance(label, str) and label.isdecimal() and int(label) in versions):
            raise UnknownWeights(f"tokens [{start}, {upto}) came from weights called {label!r}")
        versions_N[start:upto] = int(label)
        end = upto
    if end != count:
        raise EngineRefused(f"an engine's spans do not cover its {count} tokens: {str(spans)[:200]}")
    return versions_N


def checked_routes(
    routes: NDArray[np.integer[Any]] | None, request: SampleRequest, count: int, *, aborted: bool, flag: str
) -> NDArray[np.integer[Any]] | None:
    """[P + N - 1, L, K]; None where none were asked for, or the request ended before it was read.

    Raises `EngineRefused` where they are missing, which `flag` of the server would change, or of another length.
    """
    if not request.record_routes or count == 0:
        return None
    if routes is None:
        if aborted:
            return None
        raise EngineRefused(
            f"an engine returned no routed experts: start it with {flag}, or set record_routes=false"
        )
    rows = request.prompt_ids.size + count - 1
    if routes.ndim != 3 or routes.shape[0] != rows or routes.dtype.kind not in "iu":
        raise EngineRefused(
            f"an engine's routed experts are {routes.dtype} {routes.shape}; {rows} rows were sampled on"
        )
    return routes


def finish_reason(value: Any) -> str:
    """Both engines and we have the same names. Raises `EngineRefused` for another."""
    for reason in _REASONS:
        if value == reason:
            return reason
    raise EngineRefused(f"an engine ended a request with {value!r}; known are {', '.join(_REASONS)}")
