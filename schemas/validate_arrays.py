"""Checks of the arrays that events carry as little-endian bytes. Pure; raise `Refused`.

T tokens, S sampled (or trained) tokens, B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from rollwire.schemas import records as r
from rollwire.schemas.errors import Refused
from rollwire.schemas.ids import parse_rollout_id

_TOKEN_BYTES: Final = {"u1": 1, "u2": 2, "u4": 4}
_SHORT_BYTES: Final = 4_096


def _length(name: str, data: bytes, item: int, count: int, reason: str = "array_length") -> None:
    if len(data) != item * count:
        raise Refused(reason, f"{name} has {len(data)} bytes, {count} values of {item} are demanded")


def _mask(mask: bytes) -> None:
    if mask.translate(None, b"\x00\x01"):
        raise Refused("segment_invalid", "loss_mask has values other than 0 and 1")


def _logprobs(data: bytes) -> None:
    """NaN stands for a value that was never recorded, infinity is none (C01)."""
    values_S = np.frombuffer(data, "<f4")
    finite_S = np.isfinite(values_S)
    if np.count_nonzero(finite_S) == values_S.size:
        return
    bad = int(np.flatnonzero(~finite_S)[0])
    reason = "logprob_missing" if np.isnan(values_S[bad]) else "not_finite"
    raise Refused(reason, f"logprob {bad} is {values_S[bad]}")


def known_finite(arrays: Sequence[bytes]) -> bool:
    """Whether short arrays of f4 are finite, all together: one look at all costs what one look at each does.

    False means nothing: they are long, so that laying them end to end would cost more, or one of them is to be looked at.
    True says nothing of an array whose length is wrong, nor of those behind it.
    """
    size = sum(map(len, arrays))
    if size % 4 or size > _SHORT_BYTES * len(arrays):
        return False
    values_S = np.frombuffer(b"".join(arrays), "<f4")
    return bool(np.count_nonzero(np.isfinite(values_S)) == values_S.size)


def check_sequence(e: r.Rollout, *, finite: bool = False) -> None:
    """Segments tile the tokens, the mask stays inside what was sampled, spans tile what was sampled (C01, C02).

    `finite`: the logprobs are known to be, if their length is right.
    """
    item = _TOKEN_BYTES.get(e.token_dtype)
    if item is None:
        raise Refused("array_length", f"token_dtype={e.token_dtype[:20]!r}; known are u1, u2, u4")
    mask = e.loss_mask
    tokens = len(mask)
    if tokens == 0:
        raise Refused("sequence_empty", "no tokens")
    if len(e.token_ids) != item * tokens:
        _length("token_ids", e.token_ids, item, tokens)
    if mask.translate(None, b"\x00\x01"):
        _mask(mask)
    at = sampled = 0
    for segment in e.segments:
        if segment.start != at or segment.end <= at:
            raise Refused(
                "segment_invalid", f"a segment [{segment.start}, {segment.end}) where token {at} comes next"
            )
        at = segment.end
        if segment.kind == "sampled":
            sampled += at - segment.start
        elif mask.count(1, segment.start, at):
            raise Refused("segment_invalid", f"the mask trains on {segment.kind} tokens")
    if at != tokens:
        raise Refused("segment_invalid", f"segments cover {at} of {tokens} tokens")
    if sampled == 0:
        raise Refused("sequence_empty", "no sampled tokens")
    if len(e.logprobs) != 4 * sampled:
        _length("logprobs", e.logprobs, 4, sampled, "logprob_length")
    if not finite:
        _logprobs(e.logprobs)
    at = version = 0
    for span in e.spans:
        if span.start != at or span.end <= at:
            raise Refused(
                "span_invalid", f"a span [{span.start}, {span.end}) where sampled token {at} comes next"
            )
        if span.version < version:
            raise Refused("span_invalid", f"version {span.version} behind version {version}")
        at, version = span.end, span.version
    if at != sampled:
        raise Refused("span_invalid", f"spans cover {at} of {sampled} sampled tokens")


def check_shared(e: r.Rollout) -> None:
    """Shared runs ascend, come from members of lower index, and are not trained on here."""
    at = 0
    for run in e.shared:
        if run.start < at or run.end <= run.start or run.end > len(e.loss_mask) or run.from_start < 0:
            raise Refused(
                "sharing_invalid", f"a shared run [{run.start}, {run.end}) of {len(e.loss_mask)} tokens"
            )
        at = run.end
        group_id, index = parse_rollout_id(run.rollout_id)
        if group_id != e.group_id or index >= e.index:
            raise Refused(
                "sharing_invalid",
                f"{e.rollout_id} shares with {run.rollout_id}: not of its group, or not before it",
            )
        if e.loss_mask.count(1, run.start, run.end):
            raise Refused("sharing_invalid", f"the mask trains on the shared run [{run.start}, {run.end})")


def check_microbatch(m: r.Microbatch, plan: r.PackedBatch) -> int:
    """All arrays agree, the budget holds, every version lies between the oldest and the base. Returns T."""
    sequences = len(m.rollout_ids)  # none: the rank has nothing to compute in this slot of a lockstep plan
    _length("cu_seqlens", m.cu_seqlens, 4, sequences + 1)
    _length("advantages", m.advantages, 4, sequences)
    if len(m.traces) != sequences:
        raise Refused("array_length", f"{len(m.traces)} traces for {sequences} sequences")
    for name, labels in (("environments", m.environments), ("fleets", m.fleets)):
        if len(labels) not in (0, sequences):
            raise Refused("array_length", f"{len(labels)} {name} for {sequences} sequences")
    if len(m.seals) not in (0, sequences):
        raise Refused("array_length", f"{len(m.seals)} seals for {sequences} sequences")
    starts_B1 = np.frombuffer(m.cu_seqlens, "<i4")
    if starts_B1[0] != 0 or not (starts_B1[1:] > starts_B1[:-1]).all():
        raise Refused("array_length", "cu_seqlens does not ascend from 0")
    tokens = int(starts_B1[-1])
    if tokens > plan.token_budget:
        raise Refused("over_budget", f"{tokens} tokens in a microbatch of {plan.token_budget}")
    _length("token_ids", m.token_ids, 4, tokens)
    _length("loss_mask", m.loss_mask, 1, tokens)
    _mask(m.loss_mask)
    trained = m.loss_mask.count(1)
    _length("logprobs", m.logprobs, 4, trained, "logprob_length")
    _logprobs(m.logprobs)
    _length("versions", m.versions, 8, trained)
    versions_S = np.frombuffer(m.versions, "<i8")
    if trained and (versions_S.min() < plan.oldest_version or versions_S.max() > plan.base_version):
        raise Refused("inconsistent", f"versions outside [{plan.oldest_version}, {plan.base_version}]")
    if not np.isfinite(np.frombuffer(m.advantages, "<f4")).all():
        raise Refused("not_finite", "an advantage is not finite")
    return tokens
