"""The versions at rest: the chain in the store replays, and its weights prove that what was kept was trained, once, in order."""

from __future__ import annotations

from collections.abc import Sequence

from rollwire.consumers.trainer.seals import open_batch
from rollwire.consumers.trainer.sums import NOTHING, Sums, fold, state_of
from rollwire.consumers.weights.paths import anchor_step, delta_step
from rollwire.consumers.weights.reader import load_version
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import State
from rollwire.ops.simulate.laws import Laws, Limits
from rollwire.ops.simulate.world import Violated
from rollwire.schemas.errors import StoreError, WeightError
from rollwire.schemas.records import PackedBatch, WeightVersion
from rollwire.streams.pack_layout import plan_digest
from rollwire.streams.seams.store import ObjectStore
from rollwire.streams.synthetic import PeoplesKeys


def check_weights(laws: Laws, store: ObjectStore, limits: Limits) -> None:
    """Raises `Violated`. `store` is the one without faults."""
    left = [plan for plan in laws.plans if not laws.passed_over(plan) and plan.step > len(laws.steps)]
    if left:
        raise Violated("8", f"at rest, {left} are planned and not trained")
    made: list[Sums] = []
    state: State | None = None
    for version in laws.versions:
        if version.reverts_to is not None:
            sums = made[version.reverts_to]
        else:
            sums = _trained(made[-1], laws, version) if made else NOTHING
        made.append(sums)
        state = _chained(store, version, state)
        want, got = StateDigest.of(state_of(sums)).hex, StateDigest.of(state).hex
        if not want == got == version.state_digest:
            raise Violated(
                "5",
                f"version {version.version} says {version.state_digest}, the store holds {got}, its plans make {want}",
            )
    last = len(made) - 1
    line = [v for v in laws.versions[1:] if v.reverts_to is None and laws.reverts.leads(v.version, last)]
    expected = sum(len(_trained_of(laws, version.step)) for version in line)
    if made and made[-1].trained != expected:
        raise Violated(
            "4", f"{expected} rollouts were kept on the way to version {last}, {made[-1].trained} trained"
        )


def _trained(sums: Sums, laws: Laws, version: WeightVersion) -> Sums:
    """The weights after the step of a version, from its plan alone; the plan's digest is its own."""
    slices = _slices(laws, version.step)
    digest = plan_digest(slices)
    step = laws.steps[version.step - 1]
    if not digest == slices[0].plan_digest == step.plan_digest:
        raise Violated(
            "9",
            f"step {version.step}: the plan is {digest}, says {slices[0].plan_digest}, trained was {step.plan_digest}",
        )
    kept = sorted(_trained_of(laws, version.step))
    laid = sorted(name for batch in slices for micro in batch.microbatches for name in micro.rollout_ids)
    if kept != laid:
        raise Violated("6", f"step {version.step} is of groups with the rollouts {kept}, laid out are {laid}")
    return fold(sums, [open_batch(batch, PeoplesKeys()).batch for batch in slices])


def _trained_of(laws: Laws, step: int) -> list[str]:
    """The rollouts of a step's groups that are trained on: of live traffic those that were scored, since their advantages
    are the plan's own."""
    return [
        member.rollout.rollout_id
        for group in (laws.groups[group_id] for group_id in _groups(laws, step))
        for member in group.members
        if (member.reward if group.baseline == "cohort" else member.advantage) is not None
    ]


def _chained(store: ObjectStore, version: WeightVersion, before: State | None) -> State:
    """The version's bits: by its delta from the version before it; where there is a full one, by that as well."""
    try:
        full = load_version(store, [anchor_step(version)], None) if version.anchor is not None else None
        if before is None or version.base_version is None:
            if full is None:
                raise Violated("3", f"version {version.version} rests on nothing")
            return full
        state = load_version(store, [delta_step(version)], before)
    except (WeightError, StoreError) as failure:
        raise Violated(
            "3", f"version {version.version} is visible and cannot be read: {failure}"
        ) from failure
    if full is not None and StateDigest.of(full).hex != StateDigest.of(state).hex:
        raise Violated("5", f"version {version.version}: its anchor and its delta are different states")
    return state


def _slices(laws: Laws, step: int) -> Sequence[PackedBatch]:
    return [batch for _, batch in sorted(laws.plans[laws.plan_of(step)].items())]


def _groups(laws: Laws, step: int) -> tuple[str, ...]:
    return _slices(laws, step)[0].group_ids
