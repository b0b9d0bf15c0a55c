"""Routing traces that are too large for an event: the object first, then the event that claims it (law 3)."""

from __future__ import annotations

import hashlib
from urllib.parse import quote

import msgspec

from rollwire.kernels.routing.codec import check_distinct, decode_routes
from rollwire.schemas.catalogue import CLAIM_CHECK_BYTES
from rollwire.schemas.records import Claim, RoutingTrace
from rollwire.streams.seams.store import ObjectStore


def trace_key(model: str, sha256: str) -> str:
    """By content: a trace that is written twice is one object."""
    return f"routing/{quote(model, safe='')}/{sha256}"


def claim_check(trace: RoutingTrace, model: str, store: ObjectStore | None) -> RoutingTrace:
    """The trace with its data behind a claim check, where it is above 512 KiB and there is a store; else as it is.

    Nobody looks at the ids again before the trainer needs them, so they are checked here. Raises `Refused` for ids that
    are no routes, `StoreUnavailable`, `ObjectConflict`.
    """
    data = trace.data
    if data is None or len(data) <= CLAIM_CHECK_BYTES or store is None:
        return trace
    shape = (trace.rows, len(trace.layers), trace.top_k)
    check_distinct(decode_routes(trace.encoding, data, shape, trace.num_experts), trace.num_experts)
    sha256 = hashlib.sha256(data).hexdigest()
    key = trace_key(model, sha256)
    store.create(key, data)
    return msgspec.structs.replace(trace, data=None, claim=Claim(key=key, size=len(data), sha256=sha256))
