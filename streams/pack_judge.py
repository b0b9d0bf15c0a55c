"""Whether a group may be trained on at the version of use: pure, one group at a time (law 6, cases C03 and C13)."""

from __future__ import annotations

from typing import NamedTuple

from rollwire.kernels.advantages import FLOAT32_MAX
from rollwire.kernels.packing import check_length
from rollwire.schemas.errors import Refused
from rollwire.schemas.reasons import Reason
from rollwire.schemas.records import Group
from rollwire.streams.assemble_answer import BASELINE
from rollwire.streams.pack_layout import token_count, trained_members
from rollwire.streams.reverts import Reverts


class Facts(NamedTuple):
    """What judging needs to know of a group, computed once."""

    oldest_version: int
    newest_version: int
    versions: tuple[int, ...]  # all that sampled a token of it, ascending
    flaw: tuple[Reason, str] | None  # a reason that no version can change


class Bad(NamedTuple):
    reason: Reason
    detail: str
    quarantine: bool  # the raw event goes to `dead-letters` as well


def examine(group: Group, *, token_budget: int) -> Facts:
    """The facts of a group that came through the codec."""
    versions = sorted({span.version for member in group.members for span in member.rollout.spans})
    return Facts(versions[0], versions[-1], tuple(versions), _flaw(group, token_budget))


def judge_once(
    group: Group, facts: Facts, *, model: str, lineage: str, latest_version: int, reverts: Reverts
) -> Bad | None:
    """What is decided when the group arrives and holds for ever. `latest_version` must be the end of
    `weight-versions` if a version from the future is to be believed: ask again after reading on."""
    if group.lineage != lineage or group.model != model:
        return Bad(
            "lineage_abandoned",
            f"sampled from model {group.model!r}, lineage {group.lineage}; trained is {model!r}, lineage {lineage}",
            quarantine=True,
        )
    if facts.newest_version > latest_version:
        return Bad(
            "version_future",
            f"sampled from version {facts.newest_version}; the latest that was published is {latest_version}",
            quarantine=True,
        )
    abandoned = judge_line(facts, base_version=latest_version, reverts=reverts)
    if abandoned is not None:
        return abandoned._replace(quarantine=True)
    if facts.flaw is not None:
        return Bad(*facts.flaw, quarantine=False)
    return None


def judge_line(facts: Facts, *, base_version: int, reverts: Reverts) -> Bad | None:
    """Whether `base_version` was made from all that sampled the group."""
    if not reverts.known:
        return None
    strange = [version for version in facts.versions if not reverts.leads(version, base_version)]
    if not strange:
        return None
    last = reverts.known[-1]
    return Bad(
        "lineage_abandoned",
        f"sampled from version {strange[-1]}, which was given up: version {last.version} reverts to {last.to}",
        quarantine=False,
    )


def judge_at(facts: Facts, *, base_version: int, max_lag_versions: int) -> Bad | None:
    """Staleness for the version of use: policy versions between the oldest span and `base_version`, limit included."""
    lag = base_version - facts.oldest_version
    if lag > max_lag_versions:
        return Bad(
            "stale",
            f"lag of {lag} policy versions: oldest span {facts.oldest_version}, version of use {base_version}, "
            f"max_lag_versions {max_lag_versions}",
            quarantine=False,
        )
    return None


def judge_age(opened_us: int, now_us: int, max_age_us: int) -> Bad | None:
    """Freshness in minutes, besides versions: since the group was opened, limit included."""
    if now_us - opened_us <= max_age_us:
        return None
    age_s, max_s = (now_us - opened_us) / 1e6, max_age_us / 1e6
    return Bad("too_old", f"{age_s:.0f} s since it was opened, max_age_s {max_s:g}", quarantine=False)


def _flaw(group: Group, token_budget: int) -> tuple[Reason, str] | None:
    if group.baseline == BASELINE:  # advantages come later; of what nobody scored, only the silence counts
        trained = [member for member in group.members if member.reward is not None]
    else:
        trained = trained_members(group)
        if not trained or all(member.reward is None for member in group.members):
            return "unscorable", f"none of {len(group.members)} members has a reward and an advantage"
    for member in trained:
        try:
            check_length(token_count(member), token_budget)
        except Refused as refused:
            reason: Reason = "sequence_empty" if refused.reason == "sequence_empty" else "over_budget"
            return reason, f"{member.rollout.rollout_id}: {refused.detail}"
        if not abs(member.advantage or 0.0) <= FLOAT32_MAX:
            return (
                "not_finite",
                f"{member.rollout.rollout_id}: advantage {member.advantage} does not fit float32",
            )
        if 1 not in member.rollout.loss_mask:
            return "sequence_empty", f"{member.rollout.rollout_id}: the mask keeps no token"
    return None
