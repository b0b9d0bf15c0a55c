"""From what was read to the answer: who belongs to which group, step and version, and what is missing. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from rollwire.consumers.audit.lineage import (
    Answer,
    GroupLine,
    PlanSource,
    Reached,
    RolloutLine,
    Serving,
    SettingsLine,
    StepLine,
    VersionLine,
)
from rollwire.consumers.audit.lineage_events import Gathered, Plan, Sampled, erased_by
from rollwire.consumers.audit.lineage_store import InStore
from rollwire.consumers.audit.versions import Published, Taken, VersionBook, carried_by, left_by, line_to
from rollwire.schemas.records import WeightVersion
from rollwire.streams.findings import Finding, Kind, Report

Made = tuple[str, int]
"""Lineage and version: what a step made."""

_NAMED: Final = 3  # ids that a finding names of many


class Facts(NamedTuple):
    """What was read for one question."""

    asked: str
    book: VersionBook
    gathered: Gathered
    lineage: str = ""  # asked for; "" = whichever is reached
    version: int | None = None  # asked for; None = asked for events
    focus: frozenset[str] = frozenset()  # rollout and feedback ids that were asked for
    steps: tuple[Made, ...] = ()  # that took the groups in
    planned: Mapping[str, Made] = {}  # group -> the version whose plan took it
    plans: Mapping[Made, Plan] = {}  # of `steps`, as far as they were read
    stored: InStore | None = None
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    checked: Mapping[str, int] = {}


def answer(facts: Facts) -> Answer:
    """Raises nothing: what does not fit together is a finding."""
    groups = tuple(_group(facts, group) for group in _ordered(facts))
    reached = _reached(facts)
    versions = _versions(facts)
    first = reached[0] if reached else None
    served = tuple(
        Serving(
            fleet=one.said.fleet,
            replica=one.said.replica,
            version=one.said.version,
            from_us=one.said.from_us,
            until_us=one.until_us,
            at=one.said.at,
        )
        for one in facts.book.served(_wanted(facts, reached))
    )
    stored = facts.stored
    line: tuple[int, ...] = ()
    if facts.version is not None:
        line = line_to(facts.version, facts.book.of(facts.lineage))
    rollouts = [one for group in groups for one in group.rollouts]
    checked = {
        **facts.checked,
        "groups": len(groups),
        "rollouts": len(rollouts),
        "rewards": sum(len(one.rewards) for one in rollouts),
        "feedback events": sum(len(one.feedback) for one in rollouts),
        "versions": sum(len(one.carried) for one in reached),
    }
    return Answer(
        asked=facts.asked,
        focus=tuple(sorted(facts.focus)),
        lineage=facts.lineage or ("" if first is None else first.lineage),
        model=versions[0].model if versions else "" if first is None else first.model,
        groups=groups,
        steps=tuple(_step(facts, facts.book.steps[of][number]) for of, number in facts.steps),
        versions=versions,
        reached=reached,
        served=served,
        way=() if stored is None else stored.way,
        line=line,
        decided_by=_decided_by(facts),
        objects=() if stored is None else stored.objects,
        report=Report(
            command="audit lineage",
            findings=(*facts.findings, *_gaps(facts, groups)),
            checked=checked,
            notes=(*facts.notes, *_erased_note(rollouts)),
        ),
    )


def _decided_by(facts: Facts) -> tuple[SettingsLine, ...]:
    """Only of a version that is asked for: what an event reached was decided at many moments."""
    if facts.version is None or not facts.steps:
        return ()
    name, version = facts.steps[0]
    finished_us = facts.book.steps[name][version].event.finished_us
    return tuple(
        SettingsLine(
            processor=one.told.processor,
            code=one.told.code,
            digest=one.told.digest,
            config=_config(one.told.config),
            since_us=one.told.at_us,
            at=one.at,
        )
        for one in facts.book.decided_by(name, finished_us)
    )


def _config(text: str) -> dict[str, Any]:
    """Empty for what is no settings: whoever wrote such a notice, its digest is named, and the audit goes on."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}


def _ordered(facts: Facts) -> list[str]:
    """Groups as the plans took them, then by id, which is by the time they were opened."""
    taken = dict.fromkeys(group for made in facts.steps for group in _groups_of(facts, made))
    rest = sorted(facts.gathered.groups - taken.keys())
    return [group for group in taken if group in facts.gathered.groups] + rest


def _groups_of(facts: Facts, made: Made) -> Sequence[str]:
    plan = facts.plans.get(made)
    return () if plan is None else plan.groups


def _group(facts: Facts, group: str) -> GroupLine:
    decided = facts.gathered.fates.get(group)
    planned = facts.planned.get(group)
    plan = None if planned is None else facts.plans.get(planned)
    known = {one.rollout_id: one for one in facts.gathered.rollouts.values() if one.group_id == group}
    named = set() if decided is None else set(decided.event.members)
    if plan is not None:
        named |= {one for one in plan.rollouts if one.rpartition(".")[0] == group}
    lines = tuple(
        _rollout(facts, one, planned, plan)
        for one in sorted(known.values(), key=lambda r: _index(r.rollout_id))
    )
    fate = None if decided is None else decided.event
    return GroupLine(
        group_id=group,
        fate="" if fate is None else fate.fate,
        reason="" if fate is None else fate.reason,
        detail="" if fate is None else fate.detail,
        decided_us=0 if fate is None else fate.cut.clock_us,
        planned=None if planned is None else planned[1],
        made=planned[1] if planned is not None and _laid_out(group, plan) else None,
        rollouts=lines,
        absent=tuple(sorted(named - known.keys(), key=_index)),
        at=None if decided is None else decided.at,
    )


def trained_on(facts: Facts) -> dict[str, Made]:
    """Groups of which a token was trained on, as far as the plans say; where a plan is gone, all that it took."""
    return {group: made for group, made in facts.planned.items() if _laid_out(group, facts.plans.get(made))}


def _laid_out(group: str, plan: Plan | None) -> bool:
    """A production rollout that nobody scored is taken by a plan, so that it is counted, and no token of it is laid out."""
    return plan is None or group in plan.laid


def _rollout(facts: Facts, one: Sampled, planned: Made | None, plan: Plan | None) -> RolloutLine:
    trained: bool | None = False
    if planned is not None:
        trained = None if plan is None else one.rollout_id in plan.rollouts
    subject = "" if one.sealed is None else one.sealed.subject
    erasure = facts.book.erased.get(subject)
    return RolloutLine(
        rollout_id=one.rollout_id,
        group_id=one.group_id,
        lineage=one.lineage,
        environment=one.environment,
        fleet=one.fleet,
        replica=one.replica,
        versions=one.versions,
        tokens=one.tokens,
        finished_us=one.finished_us,
        subject=subject,
        erased=erased_by(one.sealed, 0 if erasure is None else erasure.generations),
        trained=trained,
        rewards=facts.gathered.rewards(one.rollout_id),
        feedback=facts.gathered.feedback(one.rollout_id),
        at=one.at,
    )


def _step(facts: Facts, taken: Taken) -> StepLine:
    event = taken.event
    made = (event.lineage, event.version)
    source: PlanSource = "packed-batches" if made in facts.plans else "group-fates"
    if not any(of == made for of in facts.planned.values()):
        source = "packed-batches" if made in facts.plans else "none"
    back = event.settings.get("revert_to")
    return StepLine(
        lineage=event.lineage,
        step=event.step,
        base_version=event.base_version,
        version=event.version,
        reverts_to=None if back is None else int(back),
        consumed=event.consumed,
        plan_digest=event.plan_digest,
        state_digest=event.state_digest,
        loss=event.loss if math.isfinite(event.loss) else None,
        reward_mean=event.reward_mean,
        learning_rate=event.learning_rate,
        max_lag=event.max_lag,
        groups=event.groups,
        sequences=event.sequences,
        trained_tokens=event.trained_tokens,
        erased_sequences=event.erased_sequences,
        code=event.settings.get("code", ""),
        settings=event.settings,
        finished_us=event.finished_us,
        plan_from=source,
        at=taken.at,
    )


def _versions(facts: Facts) -> tuple[VersionLine, ...]:
    wanted = facts.steps if facts.version is None else ((facts.lineage, facts.version),)
    found = (facts.book.versions.get(of, {}).get(number) for of, number in wanted)
    return tuple(_version(one) for one in found if one is not None)


def _version(one: Published) -> VersionLine:
    event = one.event
    return VersionLine(
        lineage=event.lineage,
        model=event.model,
        version=event.version,
        kind=event.kind,
        base_version=event.base_version,
        reverts_to=event.reverts_to,
        step=event.step,
        state_digest=event.state_digest,
        manifest=event.manifest,
        anchor=event.anchor,
        checkpoint=event.checkpoint,
        coder=event.coder,
        changed_elements=event.changed_elements,
        total_elements=event.total_elements,
        stored_bytes=event.stored_bytes,
        full_bytes=event.full_bytes,
        published_us=event.published_us,
        at=one.at,
    )


def _reached(facts: Facts) -> tuple[Reached, ...]:
    roots: dict[str, set[int]] = {}
    for of, number in facts.steps if facts.version is None else ((facts.lineage, facts.version),):
        roots.setdefault(of, set()).add(number)
    found: list[Reached] = []
    for of, trained in roots.items():
        versions = facts.book.of(of)
        carried = carried_by(sorted(trained), versions)
        if carried:
            found.append(
                Reached(
                    lineage=of,
                    model=versions[carried[0]].model,
                    trained=tuple(sorted(trained & versions.keys())),
                    carried=carried,
                    left=left_by(carried, versions),
                    newest=max(versions),
                )
            )
    return tuple(found)


def _wanted(facts: Facts, reached: Iterable[Reached]) -> dict[int, set[str]]:
    """Versions and digests whose replicas are looked for: the one asked for, or all that were reached."""
    wanted: dict[int, set[str]] = {}
    for one in reached:
        versions: Mapping[int, WeightVersion] = facts.book.of(one.lineage)
        for number in one.trained if facts.version is not None else one.carried:
            wanted.setdefault(number, set()).add(versions[number].state_digest)
    return wanted


def _gaps(facts: Facts, groups: Sequence[GroupLine]) -> tuple[Finding, ...]:
    """What the answer names, and what neither log nor archive has. Of what a plan trained on, its rewards too."""
    found: list[Finding] = []
    absent = [one for group in groups for one in group.absent]
    if absent:
        found.append(_gap("rollouts", absent, "the plans or fates name them"))
    fateless = [group.group_id for group in groups if group.planned is not None and group.at is None]
    if fateless:
        found.append(_gap("group-fates", fateless, "a step was trained on these groups"))
    unscored = [
        one.rollout_id for group in groups for one in group.rollouts if one.trained and not one.rewards
    ]
    if unscored:
        found.append(_gap("rewards", unscored, "these rollouts were trained on"))
    unheard = [
        evidence
        for group in groups
        for one in group.rollouts
        for reward in one.rewards
        for evidence in reward.evidence
        if reward.source == "user"
        and evidence.rpartition("/")[2] not in {said.feedback_id for said in one.feedback}
    ]
    if unheard:
        found.append(_gap("user-feedback", unheard, "rewards name them as what they were derived from"))
    return tuple(found)


def _gap(topic: str, ids: Sequence[str], why: str) -> Finding:
    named = ", ".join(ids[:_NAMED]) + (f" and {len(ids) - _NAMED:,} more" if len(ids) > _NAMED else "")
    return Finding(
        kind=Kind.HISTORY_GAP,
        where=f"{topic}, {len(ids):,} event{'s' if len(ids) > 1 else ''}",
        detail=f"neither log nor archive has the events of {named}; {why}",
    )


def _erased_note(rollouts: Sequence[RolloutLine]) -> tuple[str, ...]:
    gone = [one for one in rollouts if one.erased]
    if not gone:
        return ()
    people = len({one.subject for one in gone})
    whose = "a person whose keys were" if people == 1 else f"{people:,} people whose keys were"
    return (
        f"erased: {len(gone):,} of these rollouts are of {whose} destroyed on request: their tokens are gone",
    )


def _index(rollout_id: str) -> tuple[str, int]:
    group, _, index = rollout_id.rpartition(".")
    return group, int(index) if index.isdigit() else 0
