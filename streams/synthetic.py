"""Small, well-formed events of the join and word of the versions it judges them by, from a few numbers: for simulations, load and fault tools, and tests."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import numpy as np

from rollwire.kernels.seal import KEY_BYTES, NONCE_BYTES, place_of, seal
from rollwire.schemas.errors import ConfigError
from rollwire.schemas.ids import new_group_id, rollout_id
from rollwire.schemas.records import (
    Claim,
    Component,
    FinishReason,
    ProductionRollout,
    Reward,
    Rollout,
    RoutingTrace,
    Seal,
    Segment,
    Span,
    WeightVersion,
)
from rollwire.streams.seams.keys import DataKey, KeyState

LINEAGE: Final = "0198a5c0-0000-7000-8000-000000000001"
_DATA_KEY: Final = bytes(range(KEY_BYTES))
_LAYERS: Final = (0, 1, 2)
_EXPERTS: Final = 8


def group_id(opened_us: int, number: int) -> str:
    """The id of the `number`-th group, opened at `opened_us` (to the millisecond)."""
    return new_group_id(opened_us, number)


def rollout(
    group: str,
    index: int,
    size: int,
    *,
    at_us: int,
    prompt: int = 6,
    sampled: int = 10,
    version: int = 0,
    top_k: int = 2,
    finish_reason: FinishReason = "stop",
    model: str = "policy",
    seed: int = 0,
) -> Rollout:
    """`prompt` + `sampled` tokens, all sampled ones trained on, under one policy version."""
    tokens_T = (np.arange(prompt + sampled, dtype=np.int64) * 7 + index + seed) % 20
    mask_T = np.zeros(prompt + sampled, np.uint8)
    mask_T[prompt:] = 1
    return Rollout(
        rollout_id=rollout_id(group, index),
        group_id=group,
        index=index,
        group_size=size,
        model=model,
        lineage=LINEAGE,
        environment="countdown",
        task_id=f"task-{group[-8:]}",
        task='{"numbers": [1, 2, 3], "target": 6}',
        token_ids=tokens_T.astype("<u2").tobytes(),
        token_dtype="u2",
        segments=(
            Segment(kind="prompt", start=0, end=prompt),
            Segment(kind="sampled", start=prompt, end=prompt + sampled),
        ),
        loss_mask=mask_T.tobytes(),
        logprobs=np.linspace(-2.0, -0.1, sampled, dtype="<f4").tobytes(),
        spans=(Span(version=version, start=0, end=sampled),),
        finish_reason=finish_reason,
        temperature=1.0,
        top_k_experts=top_k,
        fleet="fleet",
        replica="replica-0",
        seed=seed,
        started_us=at_us,
        finished_us=at_us,
    )


class PeoplesKeys:
    """A key store of people who all have the same data key, and are never erased: a seed's history knows no chance."""

    def data_key(self, subject: str) -> DataKey:
        return DataKey(1, _DATA_KEY)

    def key_of(self, subject: str, generation: int) -> bytes:
        return _DATA_KEY

    def destroy(self, subject: str) -> int:
        raise ConfigError("synthetic people are not erased")

    def state(self, subject: str) -> KeyState:
        return KeyState((1,), ())


def answer(
    group: str,
    *,
    at_us: int,
    outcome: str = "answered",
    version: int = 0,
    prompt: int = 6,
    sampled: int = 10,
    person: int = 0,
    model: str = "policy",
) -> ProductionRollout:
    """One answer of live traffic, alone in its group, sealed with the key that `PeoplesKeys` has."""
    plain = rollout(
        group, 0, 1, at_us=at_us, prompt=prompt, sampled=sampled, version=version, top_k=0, model=model
    )
    tokens_T = np.frombuffer(plain.token_ids, "<u2").astype("<u4")
    nonce = blake2b(group.encode(), digest_size=NONCE_BYTES).digest()
    place = place_of(plain.rollout_id, "token_ids")
    sealed = seal(_DATA_KEY, tokens_T.tobytes(), nonce=nonce, aad=place)
    fields = {name: getattr(plain, name) for name in Rollout.__struct_fields__}
    fields |= {
        "token_ids": sealed.ciphertext,
        "token_dtype": "u4",
        "task": "",
        "environment": "chat",
        "sealed": Seal(subject=f"{person:032x}", key=1, nonce=nonce, tag=sealed.tag),
        "outcome": outcome,
        "tenant": "acme",
    }
    return ProductionRollout(**fields)


def said(group: str, value: float | None, *, at_us: int, signals: int = 1) -> Reward:
    """The reward that feedback earned an answer; without signals, what its silence is worth, or None."""
    return Reward(
        rollout_id=rollout_id(group, 0),
        group_id=group,
        reward=value,
        components=(),
        outcome="silent" if not signals else "scored",
        source="user",
        verifier="default",
        verifier_version="1",
        evidence=tuple(f"acme/{number}" for number in range(signals)),
        scored_us=at_us,
    )


def reward(group: str, index: int, value: float | None, *, at_us: int, verifier_version: str = "1") -> Reward:
    """A verifier's reward; None = could not be scored."""
    return Reward(
        rollout_id=rollout_id(group, index),
        group_id=group,
        reward=value,
        components=() if value is None else (Component(name="right", value=value),),
        outcome="not scored" if value is None else "scored",
        source="verifier",
        verifier="countdown",
        verifier_version=verifier_version,
        evidence=(),
        scored_us=at_us,
    )


def trace(
    group: str, index: int, *, at_us: int, rows: int = 15, top_k: int = 2, shift: int = 0
) -> RoutingTrace:
    """A routing trace of three layers of eight experts; `shift` changes its content."""
    ids_N = (np.arange(rows * len(_LAYERS))[:, None] + np.arange(top_k)[None, :] + shift) % _EXPERTS
    return RoutingTrace(
        rollout_id=rollout_id(group, index),
        group_id=group,
        layers=_LAYERS,
        num_experts=_EXPERTS,
        top_k=top_k,
        start_row=0,
        rows=rows,
        tokens=rows + 1,
        last_row="missing",
        encoding="u1",
        data=ids_N.astype(np.uint8).tobytes(),
        claim=None,
        recorded_us=at_us,
    )


def version(
    number: int,
    *,
    at_us: int,
    lineage: str = LINEAGE,
    reverts_to: int | None = None,
    digest: str = "0" * 32,
    model: str = "policy",
) -> WeightVersion:
    """Version 0 is an anchor, every other one a delta on the one before it. No object stands behind it."""
    return WeightVersion(
        model=model,
        lineage=lineage,
        version=number,
        kind="anchor" if number == 0 else "delta" if reverts_to is None else "revert",
        base_version=None if number == 0 else number - 1,
        step=number,
        manifest=Claim(key="m", size=1, sha256="0" * 64),
        anchor=None,
        checkpoint=None,
        state_digest=digest,
        full_bytes=1,
        stored_bytes=1,
        changed_elements=0,
        total_elements=1,
        published_us=at_us,
        reverts_to=reverts_to,
    )
