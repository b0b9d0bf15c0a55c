"""Checks of a routing trace (C17, C18, C22). Pure; raise `Refused`.

Data inside the event is checked whole, id by id: it is at most 512 KiB, and a trace that passed is referred to by groups
and plans without being looked at again. Behind a claim check only the sizes are known; whoever fetches it decodes it
with the same checks.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np

from rollwire.schemas import records as r
from rollwire.schemas.catalogue import CLAIM_CHECK_BYTES
from rollwire.schemas.errors import Refused
from rollwire.schemas.routes import (
    ENCODINGS,
    MAX_EXPERTS,
    check_codes,
    check_planes,
    id_bits,
    packed_bytes,
    planes_of,
)

MAX_ROUTES_BYTES: Final = 8 << 20
"""Of the decompressed routes inside an event: a zstd frame of 512 KiB cannot make a reader build more."""


def check_routes(e: r.RoutingTrace) -> None:
    """Rows, ids and encoding fit; data or a claim, not both; no expert twice in a row of a layer."""
    if e.encoding not in ENCODINGS:
        raise Refused("routing_invalid", f"encoding={e.encoding[:20]!r}; known are {', '.join(ENCODINGS)}")
    most = 256 if e.encoding == "u1" else MAX_EXPERTS
    if not 1 <= e.num_experts <= most or not 1 <= e.top_k <= e.num_experts:
        raise Refused("routing_invalid", f"top {e.top_k} of {e.num_experts} experts, {most} at most")
    layers = e.layers
    if not layers or layers[0] < 0 or any(a >= b for a, b in pairwise(layers)):
        raise Refused("routing_invalid", f"layers {layers[:16]} do not ascend")
    if e.rows < 1 or e.start_row < 0:
        raise Refused("routing_invalid", f"rows [{e.start_row}, {e.start_row} + {e.rows})")
    if (e.data is None) == (e.claim is None):
        raise Refused("routing_invalid", "either data or claim, one of them")
    if e.data is not None:
        _check_data(e, e.data)
    elif e.claim is not None:
        _check_claim(e, e.claim)
    _check_rows(e)


def _check_rows(e: r.RoutingTrace) -> None:
    """A row a token, or all but the last: which of them is told, not guessed (C17)."""
    if e.last_row not in ("recorded", "missing"):
        raise Refused("routing_invalid", f"last_row={e.last_row}: is there a row of the last token or not?")
    end = e.tokens if e.last_row == "recorded" else e.tokens - 1
    if e.start_row + e.rows != end:
        raise Refused(
            "routing_invalid",
            f"rows end at {e.start_row + e.rows}; of {e.tokens} tokens, the last one's row {e.last_row}, they end at {end}",
        )


def _size(e: r.RoutingTrace, count: int) -> int:
    return count if e.encoding == "u1" else packed_bytes(count, id_bits(e.num_experts))


def _check_data(e: r.RoutingTrace, data: bytes) -> None:
    if len(data) > CLAIM_CHECK_BYTES:
        raise Refused(
            "too_large", f"{len(data)} bytes of routes; above {CLAIM_CHECK_BYTES} they are a claim check"
        )
    count = e.rows * len(e.layers) * e.top_k
    size = _size(e, count)
    if size > MAX_ROUTES_BYTES:
        reason = "too_large" if e.encoding == "bits+zstd" else "array_length"
        raise Refused(reason, f"{size} bytes of routes; {MAX_ROUTES_BYTES} at most inside an event")
    planes = planes_of(e.encoding, data, size)
    if e.encoding == "u1":
        ids_NK = np.frombuffer(planes, np.uint8).reshape(-1, e.top_k)
        if int(ids_NK.max()) >= e.num_experts:
            raise Refused("routing_invalid", f"an expert id of {e.num_experts} or more")
        check_codes(ids_NK, e.num_experts)
    else:
        check_planes(planes, count, e.num_experts, e.top_k)


def _check_claim(e: r.RoutingTrace, claim: r.Claim) -> None:
    if e.encoding != "bits+zstd" and claim.size != _size(e, e.rows * len(e.layers) * e.top_k):
        raise Refused("array_length", f"a claim of {claim.size} bytes does not hold the rows of routes")
