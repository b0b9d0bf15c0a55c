"""Checks of one event's meaning, beyond its types: what passes is well-formed.

Pure; each check raises `Refused` with a reason code. Nothing is repaired, padded or cut (law 10). What needs more than
the event itself (is the version published, is the lineage trained) is asked by the processors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, Final

from rollwire.schemas import records as r
from rollwire.schemas.errors import Refused
from rollwire.schemas.ids import is_group_id, parse_rollout_id
from rollwire.schemas.pseudonyms import is_pseudonym
from rollwire.schemas.reasons import REASONS
from rollwire.schemas.validate_arrays import check_microbatch, check_sequence, check_shared, known_finite
from rollwire.schemas.validate_feedback import check_feedback
from rollwire.schemas.validate_live import (
    check_cohort,
    check_coverage,
    check_production,
    check_seal,
    check_sealed,
)
from rollwire.schemas.validate_routes import check_routes

# Microseconds between 2000-01-01 and 2100-01-01. Seconds and milliseconds fall below, nanoseconds above (C45).
_EARLIEST_US: Final = 946_684_800_000_000
_LATEST_US: Final = 4_102_444_800_000_000

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,199}")
# Names are few and come with every event: those that were seen to be good are remembered, up to so many.
_GOOD_NAMES: Final[set[str]] = set()
_REMEMBERED: Final = 4_096
_HEX: Final = re.compile(r"[0-9a-f]{16,128}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_REASONS: Final = frozenset(REASONS)

# What a group and each of its rollouts say both.
_OF_GROUP: Final = ("group_id", "model", "lineage", "environment", "task_id", "group_size")
_of_group: Final = attrgetter(*_OF_GROUP)
_BASELINES: Final = ("mean", "leave_one_out", "cohort")
_NAMES_OF_ROLLOUT: Final = ("model", "lineage", "environment", "task_id", "fleet", "replica")
_names_of_rollout: Final = attrgetter(*_NAMES_OF_ROLLOUT)


def check_time(name: str, time_us: int) -> None:
    """Raises `Refused(time_invalid)` where a time is plainly not in microseconds since the epoch."""
    if not _EARLIEST_US <= time_us < _LATEST_US:
        raise Refused("time_invalid", f"{name}={time_us} is not microseconds since the epoch (2000 to 2100)")


def _ensure(holds: bool, reason: str, detail: str) -> None:
    if not holds:
        raise Refused(reason, detail)


def _names(event: r.Event, *fields: str) -> None:
    for field in fields:
        text = getattr(event, field)
        if text in _GOOD_NAMES:
            continue
        if not _NAME.fullmatch(text):
            raise Refused("id_invalid", f"{field}={text[:80]!r} is empty, too long or has odd characters")
        if len(_GOOD_NAMES) >= _REMEMBERED:
            _GOOD_NAMES.clear()
        _GOOD_NAMES.add(text)


def _group(group_id: str) -> None:
    if not is_group_id(group_id):
        raise Refused("id_invalid", f"group_id={group_id[:80]!r} is not a UUIDv7")


def _rollout_of(group_id: str, rollout_id: str) -> int:
    """The index of a rollout id of this group."""
    group, index = parse_rollout_id(rollout_id)
    if group != group_id:
        raise Refused("id_invalid", f"rollout_id={rollout_id!r} is not of group {group_id[:80]!r}")
    return index


def _finite(name: str, value: float | None) -> None:
    if value is not None and not math.isfinite(value):
        raise Refused("not_finite", f"{name} is {value}")


def _share(name: str, value: float | None) -> None:
    _finite(name, value)
    if value is not None and not 0.0 <= value <= 1.0:
        raise Refused("inconsistent", f"{name}={value} is no share")


def _not_negative(event: r.Event, *fields: str) -> None:
    for field in fields:
        if getattr(event, field) < 0:
            raise Refused("inconsistent", f"{field}={getattr(event, field)} is negative")


def _digest(name: str, text: str) -> None:
    _ensure(_HEX.fullmatch(text) is not None, "id_invalid", f"{name}={text[:80]!r} is no digest in hex")


def _position(position: r.Position | None, topic: str | None = None) -> None:
    """`topic`: the only one that may stand here; None = any well-formed name."""
    if position is None:
        return
    if topic is None:
        _names(position, "topic")
    elif position.topic != topic:
        raise Refused("inconsistent", f"a position in {position.topic[:80]!r} where one in {topic} belongs")
    if position.partition < 0 or position.offset < 0:
        raise Refused("inconsistent", f"position {position.partition}:{position.offset} is negative")


def _cut(cut: r.Cut) -> None:
    check_time("cut.clock_us", cut.clock_us)
    for position in cut.inputs:
        _position(position)


def _claim(name: str, claim: r.Claim | None) -> None:
    if claim is None:
        return
    _ensure(bool(claim.key), "id_invalid", f"{name}.key is empty")
    _ensure(claim.size > 0, "inconsistent", f"{name}.size={claim.size}")
    _ensure(_SHA256.fullmatch(claim.sha256) is not None, "id_invalid", f"{name}.sha256 is no SHA-256 in hex")


def _distinct(name: str, values: Iterable[str], reason: str = "inconsistent") -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise Refused(reason, f"{name} has {value[:80]!r} twice")
        seen.add(value)


def _rollout(e: r.Rollout, *, finite: bool = False) -> None:
    """`finite`: see `check_sequence`."""
    _group(e.group_id)
    if e.rollout_id != f"{e.group_id}.{e.index}":
        raise Refused("id_invalid", f"rollout_id={e.rollout_id[:80]!r} is not <group_id>.<index>")
    if not 0 <= e.index < e.group_size:
        raise Refused("id_invalid", f"index={e.index} in a group of {e.group_size}")
    if not _GOOD_NAMES.issuperset(_names_of_rollout(e)):
        _names(e, *_NAMES_OF_ROLLOUT)
    # Most events are rollouts: of what is right here, a call each says nothing and costs a tenth of decoding.
    if not 0.0 < e.temperature < math.inf:
        _finite("temperature", e.temperature)
        raise Refused("inconsistent", f"temperature={e.temperature}")
    if e.top_k_experts < 0 or not _EARLIEST_US <= e.started_us <= e.finished_us < _LATEST_US:
        _not_negative(e, "top_k_experts")
        check_time("started_us", e.started_us)
        check_time("finished_us", e.finished_us)
    check_sequence(e, finite=finite)
    check_shared(e)
    if e.outcome:
        _names(e, "outcome")
    if e.tenant or e.sealed is not None:
        check_sealed(e)


def _production_rollout(e: r.ProductionRollout) -> None:
    _rollout(e)
    check_production(e)


def _reward(e: r.Reward) -> None:
    _group(e.group_id)
    _rollout_of(e.group_id, e.rollout_id)
    _names(e, "verifier", "verifier_version")
    _finite("reward", e.reward)
    for component in e.components:
        _finite(f"component {component.name[:80]!r}", component.value)
    _distinct("components", (c.name for c in e.components), "reward_invalid")
    check_time("scored_us", e.scored_us)


def _feedback(e: r.Feedback) -> None:
    _group(e.group_id)
    _rollout_of(e.group_id, e.rollout_id)
    _finite("value", e.value)
    check_feedback(e)
    if e.seal is not None:
        check_seal("seal", e.seal)
    check_time("happened_us", e.happened_us)
    check_time("received_us", e.received_us)


def _routing_trace(e: r.RoutingTrace) -> None:
    _group(e.group_id)
    _rollout_of(e.group_id, e.rollout_id)
    _claim("claim", e.claim)
    check_time("recorded_us", e.recorded_us)
    check_routes(e)


def _group_event(e: r.Group) -> None:
    validate_group(e, rollouts=True)


def validate_group(e: r.Group, *, rollouts: bool) -> None:
    """A group; without `rollouts` all but what each of its rollouts says alone. Raises `Refused`."""
    _group(e.group_id)
    _names(e, "model", "lineage", "environment", "task_id")
    _ensure(e.baseline in _BASELINES, "inconsistent", f"baseline={e.baseline[:80]!r}")
    _ensure(0 < len(e.members) <= e.group_size, "inconsistent", f"{len(e.members)} members of {e.group_size}")
    before, shared = -1, _of_group(e)
    finite = rollouts and known_finite([member.rollout.logprobs for member in e.members])
    for member in e.members:
        rollout = member.rollout
        if rollouts:
            _rollout(rollout, finite=finite)
        if _of_group(rollout) != shared:
            field = next(name for name in _OF_GROUP if getattr(rollout, name) != getattr(e, name))
            raise Refused("inconsistent", f"{field} of member {rollout.index} is not the group's")
        if rollout.index <= before:
            raise Refused("inconsistent", f"member {rollout.index} stands behind {before}")
        before = rollout.index
        _finite("reward", member.reward)
        _finite("advantage", member.advantage)
        _position(member.trace, "routing-traces")
        if member.signals < 0:
            raise Refused("inconsistent", f"signals={member.signals} is negative")
    if e.baseline == "cohort":
        early = [member.rollout.index for member in e.members if member.advantage is not None]
        _ensure(
            not early, "inconsistent", f"members {early[:20]} have advantages before their cohort is known"
        )
    _cut(e.cut)


def _group_fate(e: r.GroupFate) -> None:
    _group(e.group_id)
    _ensure(e.reason in _REASONS, "inconsistent", f"reason={e.reason[:80]!r} is no reason code")
    _ensure((e.fate == "kept") == (e.reason == "trained"), "inconsistent", f"{e.fate} because {e.reason}")
    _names(e, "decided_by", "fleet", "replica")
    for rollout_id in e.members:
        _rollout_of(e.group_id, rollout_id)
    _distinct("members", e.members)
    _finite("reward_mean", e.reward_mean)
    _not_negative(e, "group_size")
    if e.place is not None:
        _ensure(e.fate == "kept", "inconsistent", f"{e.fate}, and has place={e.place} in a plan")
        _not_negative(e, "place")
    _cut(e.cut)


def _group_closed(e: r.GroupClosed) -> None:
    _group(e.group_id)
    known = e.reason in _REASONS or (e.reason == "" and e.fate == "kept")
    _ensure(known, "inconsistent", f"reason={e.reason[:80]!r} is no reason code")
    check_time("closed_us", e.closed_us)


def _packed_batch(e: r.PackedBatch) -> None:
    _names(e, "model", "lineage")
    _ensure(e.step >= 1, "inconsistent", f"step={e.step}")
    _ensure(0 <= e.rank < e.ranks, "inconsistent", f"rank={e.rank} of {e.ranks}")
    _not_negative(e, "base_version", "max_lag_versions", "oldest_version")
    _ensure(
        e.oldest_version <= e.base_version, "version_future", f"{e.oldest_version} is above {e.base_version}"
    )
    lag = e.base_version - e.oldest_version
    _ensure(
        lag <= e.max_lag_versions, "stale", f"the oldest version lags {lag}, allowed are {e.max_lag_versions}"
    )
    _ensure(
        e.newest_revert is None or 0 < e.newest_revert < e.step,
        "inconsistent",
        f"step {e.step} after a revert at version {e.newest_revert}",
    )
    _finite("reward_mean", e.reward_mean)
    for group_id in e.group_ids:
        _group(group_id)
    _distinct("group_ids", e.group_ids)
    _digest("plan_digest", e.plan_digest)
    sequences = tokens = 0
    for microbatch in e.microbatches:
        for rollout_id in microbatch.rollout_ids:
            parse_rollout_id(rollout_id)
        for trace in microbatch.traces:
            _position(trace, "routing-traces")
        tokens += check_microbatch(microbatch, e)
        sequences += len(microbatch.rollout_ids)
        for seal in microbatch.seals:
            if seal is not None:
                check_seal("seals", seal)
    _distinct("microbatches", (i for m in e.microbatches for i in m.rollout_ids))
    check_cohort(e)
    _ensure(
        sequences <= e.total_sequences and tokens <= e.total_tokens,
        "inconsistent",
        f"{sequences} sequences of {e.total_sequences}, {tokens} tokens of {e.total_tokens}",
    )
    _cut(e.cut)


def _train_step(e: r.TrainStep) -> None:
    _names(e, "model", "lineage")
    _ensure(e.step >= 1, "inconsistent", f"step={e.step}")
    _not_negative(e, "base_version", "sequences", "tokens", "trained_tokens", "groups", "max_lag")
    _not_negative(e, "masked_low", "masked_high", "rejected_sequences", "rejected_tokens")
    _not_negative(e, "production_sequences", "erased_sequences")
    _ensure(
        e.erased_sequences <= e.production_sequences <= e.sequences,
        "inconsistent",
        f"{e.erased_sequences} erased of {e.production_sequences} production sequences, {e.sequences} in all",
    )
    check_coverage(e.coverage)
    _ensure(
        e.version == e.base_version + 1, "inconsistent", f"version {e.version} from base {e.base_version}"
    )
    # loss, grad_norm, entropy and the mismatches stay as measured: a diverging step is recorded as what it was.
    for field in ("learning_rate", "reward_mean", "tokens_per_s", "duration_ms"):
        _finite(field, getattr(e, field))
    _share("routes_differing", e.routes_differing)
    _share("ratio_truncated", e.ratio_truncated)
    lags = [count.lag for count in e.lag_histogram]
    _ensure(lags == sorted(set(lags)) and all(lag >= 0 for lag in lags), "inconsistent", f"lags {lags[:20]}")
    counted = sum(count.tokens for count in e.lag_histogram)
    _ensure(
        counted == e.trained_tokens, "inconsistent", f"lags of {counted} tokens, trained {e.trained_tokens}"
    )
    left_out = e.masked_low + e.masked_high + e.rejected_tokens
    _ensure(
        left_out <= e.trained_tokens and e.rejected_sequences <= e.sequences,
        "inconsistent",
        f"{left_out} of {e.trained_tokens} tokens left out, {e.rejected_sequences} of {e.sequences} sequences",
    )
    _ensure(all(count >= 0 for count in e.routes_implausible), "inconsistent", "a negative count of experts")
    _mismatch_by(e)
    for range_ in e.consumed:
        _ensure(range_.topic == "packed-batches", "inconsistent", f"consumed {range_.topic[:80]!r}")
        _ensure(
            range_.partition >= 0 and 0 <= range_.start <= range_.end, "inconsistent", f"consumed {range_}"
        )
    _digest("plan_digest", e.plan_digest)
    _digest("state_digest", e.state_digest)
    check_time("finished_us", e.finished_us)


def _mismatch_by(e: r.TrainStep) -> None:
    """By version or in total, the rows cover every trained token once."""
    totals = sum(row.tokens for row in e.mismatch_by if row.version is None)
    parts = sum(row.tokens for row in e.mismatch_by if row.version is not None)
    _ensure(
        not e.mismatch_by or totals == parts == e.trained_tokens,
        "inconsistent",
        f"mismatch_by has {totals} tokens in total, {parts} by version, trained {e.trained_tokens}",
    )
    _ensure(all(row.tokens > 0 for row in e.mismatch_by), "inconsistent", "a mismatch of no tokens")
    keys = [(row.environment, row.fleet, row.version) for row in e.mismatch_by]
    _ensure(len(keys) == len(set(keys)), "inconsistent", "mismatch_by names one thing twice")


def _shards(objects: tuple[r.LinkObject, ...]) -> int:
    """Bytes of a delta's shards together."""
    for shard in objects:
        _claim("objects", r.Claim(key=shard.key, size=shard.size, sha256=shard.sha256))
        _ensure(0 < shard.head_bytes <= shard.size, "inconsistent", f"a head of {shard.head_bytes} bytes")
    return sum(shard.size for shard in objects)


def _weight_version(e: r.WeightVersion) -> None:
    _names(e, "model", "lineage")
    _not_negative(e, "version", "step", "full_bytes", "stored_bytes", "changed_elements", "total_elements")
    if e.base_version is None:
        _ensure(
            e.kind not in ("delta", "empty"), "inconsistent", f"a version of kind {e.kind} without a base"
        )
    else:
        _ensure(e.kind != "anchor", "inconsistent", f"an anchor with base {e.base_version}")
        _ensure(0 <= e.base_version < e.version, "inconsistent", f"{e.version} on base {e.base_version}")
    _ensure(e.changed_elements <= e.total_elements, "inconsistent", "more elements changed than there are")
    _ensure(e.kind != "empty" or e.changed_elements == 0, "inconsistent", "an empty version changes elements")
    reverts = e.reverts_to is not None and 0 <= e.reverts_to < e.version - 1
    _ensure(
        reverts if e.kind == "revert" else e.reverts_to is None,
        "inconsistent",
        f"version {e.version} of kind {e.kind} reverts to {e.reverts_to}",
    )
    if e.coder:
        _names(e, "coder")
    _ensure(
        _shards(e.objects) <= e.stored_bytes, "inconsistent", f"objects above {e.stored_bytes} stored bytes"
    )
    _claim("manifest", e.manifest)
    _claim("anchor", e.anchor)
    _claim("checkpoint", e.checkpoint)
    _digest("state_digest", e.state_digest)
    check_time("published_us", e.published_us)


def _weight_link(e: r.WeightLink) -> None:
    _names(e, "model", "lineage")
    _not_negative(e, "version", "stored_bytes")
    _ensure(e.base_version is None or e.base_version >= 0, "inconsistent", f"base {e.base_version}")
    _ensure(e.base_version != e.version, "inconsistent", f"a link from version {e.version} to itself")
    check_time("published_us", e.published_us)
    if e.kind == "gone":
        _ensure(not e.objects and not e.stored_bytes, "inconsistent", "a way that is gone names objects")
        return
    base = -1 if e.base_version is None else e.base_version
    _ensure(e.base_version is not None, "inconsistent", f"a link of kind {e.kind} without a base")
    _ensure(e.kind != "skip" or base < e.version, "inconsistent", f"a skip from {base} to {e.version}")
    _ensure(e.kind != "inverse" or base > e.version, "inconsistent", f"an inverse from {base} to {e.version}")
    _names(e, "coder")
    _digest("base_digest", e.base_digest)
    _digest("state_digest", e.state_digest)
    total = _shards(e.objects)
    _ensure(total == e.stored_bytes, "inconsistent", f"objects of {total} bytes, stored {e.stored_bytes}")


def _fleet_status(e: r.FleetStatus) -> None:
    _names(e, "fleet", "replica")
    _ensure(e.version >= -1 and e.wanted_version >= -1, "inconsistent", "a version below -1")
    if e.version >= 0 or e.state_digest:
        _digest("state_digest", e.state_digest)
    _finite("stage_ms", e.stage_ms)
    _finite("pause_ms", e.pause_ms)
    _not_negative(e, "stage_ms", "pause_ms", "open_rollouts", "fetched_bytes")
    check_time("at_us", e.at_us)


def _evaluation(e: r.Evaluation) -> None:
    _names(e, "model", "lineage", "replica")
    _not_negative(e, "tasks", "samples_per_task")
    if e.promotion is None:
        _names(e, "suite")
        _not_negative(e, "version")
    else:
        _names(e.promotion, "channel", "by")
        _ensure(
            not (e.suite or e.scores or e.tasks or e.samples_per_task),
            "inconsistent",
            "a promotion with a suite or scores",
        )
        _ensure(e.version >= -1, "inconsistent", f"a promotion of version {e.version}")
    for score in e.scores:
        _finite(f"score {score.name[:80]!r}", score.value)
    _distinct("scores", (s.name for s in e.scores))
    check_time("at_us", e.at_us)


def _notice(e: r.Notice) -> None:
    _names(e, "model", "name")
    check_time("at_us", e.at_us)


def _erasure(e: r.Erasure) -> None:
    _ensure(is_pseudonym(e.subject), "id_invalid", f"subject={e.subject[:80]!r} is no pseudonym")
    _names(e, "request_id", "by")
    _not_negative(e, "generations")
    check_time("erased_us", e.erased_us)


def _dead_letter(e: r.DeadLetter) -> None:
    _position(e.source)
    _ensure(e.reason in _REASONS, "inconsistent", f"reason={e.reason[:80]!r} is no reason code")
    _names(e, "refused_by")
    check_time("refused_us", e.refused_us)


_CHECKS: Final[dict[type[r.Event], Callable[[Any], None]]] = {
    r.Rollout: _rollout,
    r.ProductionRollout: _production_rollout,
    r.Reward: _reward,
    r.Feedback: _feedback,
    r.RoutingTrace: _routing_trace,
    r.Group: _group_event,
    r.GroupFate: _group_fate,
    r.GroupClosed: _group_closed,
    r.ProductionGroupClosed: _group_closed,
    r.PackedBatch: _packed_batch,
    r.TrainStep: _train_step,
    r.WeightVersion: _weight_version,
    r.WeightLink: _weight_link,
    r.FleetStatus: _fleet_status,
    r.Evaluation: _evaluation,
    r.Notice: _notice,
    r.Erasure: _erasure,
    r.DeadLetter: _dead_letter,
}


def validate(event: r.Event) -> None:
    """Raises `Refused` where the event contradicts itself. Its fields must have their declared types already."""
    _CHECKS[type(event)](event)


def validate_finite(event: r.Rollout) -> None:
    """As `validate`, of a rollout whose logprobs are known to be finite if their length is right: see `known_finite`."""
    _rollout(event, finite=True)
    if isinstance(event, r.ProductionRollout):
        check_production(event)
