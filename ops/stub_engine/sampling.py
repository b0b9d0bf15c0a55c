"""From either server's sampling parameters to a request of the built-in engine, and the parts of the answers that both share."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollwire.ops.stub_engine.core import StubCore, StubResult
from rollwire.ops.stub_engine.http import Refusal
from rollwire.streams.seams.engine import SampleRequest


def sample_request(
    core: StubCore,
    request_id: str,
    token_ids: Sequence[int],
    *,
    max_tokens: int | None,
    seed: int | None,
    temperature: float,
    stop_ids: Sequence[int],
    routes: bool,
    plain: Mapping[str, tuple[object, object]],
) -> SampleRequest:
    """`plain` names parameters, each with the value given and the only one that the built-in engine samples with.

    Raises `Refusal` (400) for any other value: nothing is sampled in another way than was asked for.
    """
    for name, (given, only) in plain.items():
        if given != only:
            raise Refusal(400, f"{name}={given!r}: the stub samples with {name}={only!r} only")
    if not token_ids or min(token_ids) < 0 or max(token_ids) >= core.policy.vocab_size:
        raise Refusal(400, f"token ids must be 0..{core.policy.vocab_size - 1}, at least one")
    room = core.policy.max_position_embeddings - len(token_ids)
    return SampleRequest(
        request_id=request_id,
        prompt_ids=np.array(token_ids, np.int64),
        max_new_tokens=room if max_tokens is None else max_tokens,
        seed=secrets.randbits(63) if seed is None else seed & (1 << 63) - 1,
        temperature=temperature,
        record_routes=routes,
        stop_ids=tuple(stop_ids),
    )


def spans_json(result: StubResult) -> list[dict[str, Any]]:
    return [span._asdict() for span in result.spans]


def stop_reason(core: StubCore, result: StubResult) -> int | None:
    """The stop token that is not the end token."""
    tokens = result.sampled.token_ids
    if result.sampled.finish_reason != "stop" or int(tokens[-1]) == core.policy.eos_token_id:
        return None
    return int(tokens[-1])


def routes_from(result: StubResult, start: int) -> NDArray[np.integer[Any]] | None:
    """Rows [start, end); None where nothing was recorded, or the prompt was not read."""
    routes = result.sampled.routes
    if routes is None or not result.sampled.token_ids.size:
        return None
    return routes[start:]
