"""Checks of what live traffic adds to rollouts, plans and steps: seals, and how well a cohort is covered. Pure; raise `Refused`."""

from __future__ import annotations

import math

from rollwire.schemas import records as r
from rollwire.schemas.errors import Refused
from rollwire.schemas.pseudonyms import is_pseudonym
from rollwire.schemas.validate_feedback import TENANT

_NONCE_BYTES = 12
_TAG_BYTES = 16


def _ensure(holds: bool, reason: str, detail: str) -> None:
    if not holds:
        raise Refused(reason, detail)


def check_sealed(e: r.Rollout) -> None:
    """What a rollout with a seal, or of a tenant, must be."""
    if e.sealed is not None:
        check_seal("sealed", e.sealed)
        _ensure(
            e.token_dtype == "u4" and not e.task,
            "seal_invalid",
            f"{e.rollout_id} is sealed: its tokens must be u4, not {e.token_dtype[:20]!r}, and its task empty",
        )
    tenant = not e.tenant or TENANT.fullmatch(e.tenant) is not None
    _ensure(tenant, "id_invalid", f"tenant={e.tenant[:80]!r} is too long or has odd characters")


def check_production(e: r.ProductionRollout) -> None:
    """One sample a prompt, never in plain; its routes are not recorded: they would tell of its tokens, and nobody joins them."""
    _ensure(e.sealed is not None, "seal_invalid", f"{e.rollout_id} is live traffic, and not sealed")
    _ensure(e.group_size == 1, "inconsistent", f"a group of {e.group_size} in live traffic")
    _ensure(e.top_k_experts == 0, "routing_invalid", f"{e.rollout_id} waits for a trace that is never joined")


def check_seal(name: str, seal: r.Seal) -> None:
    """The form of a seal; whether it opens anything, only its key tells."""
    _ensure(
        is_pseudonym(seal.subject),
        "seal_invalid",
        f"{name}.subject={seal.subject[:80]!r} is no pseudonym of 32 hex digits",
    )
    _ensure(seal.key >= 0, "seal_invalid", f"{name}.key={seal.key} is negative")
    _ensure(
        len(seal.nonce) == _NONCE_BYTES and len(seal.tag) == _TAG_BYTES,
        "seal_invalid",
        f"{name} has a nonce of {len(seal.nonce)} bytes and a tag of {len(seal.tag)}, demanded are {_NONCE_BYTES} "
        f"and {_TAG_BYTES}",
    )


def check_coverage(rows: tuple[r.Coverage, ...]) -> None:
    """By outcome ascending, each once; no more signals or rewards than rollouts."""
    outcomes = [row.outcome for row in rows]
    _ensure(outcomes == sorted(set(outcomes)), "inconsistent", f"coverage of the outcomes {outcomes[:20]}")
    for row in rows:
        _ensure(
            row.rollouts > 0 and 0 <= row.signalled <= row.rollouts and 0 <= row.scored <= row.rollouts,
            "inconsistent",
            f"{row.signalled} signalled and {row.scored} scored of {row.rollouts} rollouts, {row.outcome[:80]!r}",
        )


def check_cohort(e: r.PackedBatch) -> None:
    """What a plan says of its live traffic."""
    check_coverage(e.coverage)
    counted = sum(row.rollouts for row in e.coverage)
    _ensure(counted == e.cohort_size, "inconsistent", f"coverage of {counted} in a cohort of {e.cohort_size}")
    mean = e.cohort_mean
    _ensure(mean is None or math.isfinite(mean), "not_finite", f"cohort_mean is {mean}")
    _ensure(e.max_age_ms is None or e.max_age_ms >= 0, "inconsistent", f"max_age_ms={e.max_age_ms}")
