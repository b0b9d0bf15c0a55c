"""The right half of a picture of lineage: plans, steps, versions and who served them. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from rollwire.consumers.audit.lineage import Answer, Serving, StepLine, VersionLine
from rollwire.consumers.audit.versions import ranges
from rollwire.ops.lineage_boxes import SOME, Boxes, Node, Tone, asked_for, bucketed, listed_of, span
from rollwire.ops.lineage_text import bytes_text, clock, many, way_text, when


def training(made: Boxes, answer: Answer) -> dict[int, str]:
    """Boxes of plans and steps; the plan's (or, of a revert, the step's) by the version that was made."""
    first: dict[int, str] = {}
    weights, lit = _weights(answer)
    for name, some in bucketed(answer.steps, lambda step: step.version):
        one = some[0]
        tone: Tone = "plain"
        if one.reverts_to is not None and len(some) == 1:
            lines = (f"goes back to version {one.reverts_to}", "trained on nothing")
            made.nodes.append(Node(f"s {name}", 4, f"step {name}", lines, tone))
            first[one.version] = f"s {name}"
            continue
        made.nodes.append(_plan_node(name, some, answer))
        made.nodes.append(_step_node(name, some))
        made.join(
            f"p {name}",
            f"s {name}",
            weight=sum(weights.get(step.version, 1) for step in some),
            focus=any(step.version in lit for step in some),
        )
        first.update({step.version: f"p {name}" for step in some})
    return first


def _weights(answer: Answer) -> tuple[dict[int, int], set[int]]:
    """How many of the answer's groups each version was trained on, and the versions that hold what was asked for."""
    focus = frozenset(answer.focus)
    weights: dict[int, int] = defaultdict(int)
    lit: set[int] = set()
    for group in answer.groups:
        if group.made is not None:
            weights[group.made] += 1
            if any(asked_for(one, focus) for one in group.rollouts):
                lit.add(group.made)
    return weights, lit


def _plan_node(name: str, some: Sequence[StepLine], answer: Answer) -> Node:
    gone = sum(step.plan_from != "packed-batches" for step in some)
    groups, sequences = sum(step.groups for step in some), sum(step.sequences for step in some)
    lines = [f"{groups:,} groups, {sequences:,} sequences"]
    if len(some) == 1 and not gone and some[0].consumed:
        one = some[0].consumed[0]
        more = f" and {len(some[0].consumed) - 1} more" if len(some[0].consumed) > 1 else ""
        lines.append(f"{one.topic}[{one.partition}] {one.start:,}{more}")
    elif gone:
        lines.append("known by the groups' fates")
    title = f"plan {some[0].plan_digest[:8]}" if len(some) == 1 else f"{len(some):,} plans"
    listed = listed_of((*(f"plan {step.plan_digest}" for step in some), *_settings(answer)))
    return Node(f"p {name}", 3, title, tuple(lines), "plain", (), listed)


def _settings(answer: Answer) -> list[str]:
    return [
        f"{one.processor}, code {one.code}: {name} = {msgspec.json.encode(values).decode()}"
        for one in answer.decided_by
        for name, values in sorted(one.config.items())
    ]


def _step_node(name: str, some: Sequence[StepLine]) -> Node:
    listed = listed_of(
        f"step {step.step}: {step.groups:,} groups, reward {step.reward_mean:.3g}, code {step.code or 'not recorded'}"
        for step in some
    )
    if len(some) > 1:
        mean = sum(step.reward_mean for step in some) / len(some)
        lines: tuple[str, ...] = (
            f"mean reward {mean:.3g}",
            f"{sum(s.trained_tokens for s in some):,} tokens trained",
        )
        return Node(f"s {name}", 4, f"steps {name}", lines, "plain", (), listed)
    one = some[0]
    loss = "" if one.loss is None else f", loss {one.loss:.3g}"
    lines = (
        f"reward {one.reward_mean:.3g}{loss}",
        f"{one.trained_tokens:,} tokens trained, lag {one.max_lag}",
        f"code {one.code.partition('+')[2] or one.code or 'not recorded'}",
    )
    settings = tuple(f"{key} = {value}" for key, value in sorted(one.settings.items()))
    return Node(f"s {name}", 4, f"step {one.step}", lines, "plain", (), (*listed, *settings))


def versions(made: Boxes, answer: Answer, of_step: Mapping[int, str]) -> None:
    """Boxes of versions and of who served them. Above what was asked for stands what it was made through."""
    holds: dict[str, set[int]] = {}
    before = f"v {ranges(answer.line[:-1])}" if len(answer.line) > 1 else None
    if before is not None:
        way = way_text(answer)
        lines = ("what it was made through", *((f"rebuilt by {way}",) if way else ()))
        made.nodes.append(
            Node(
                before,
                5,
                f"versions {before[2:]}" if len(answer.line) > 2 else f"version {before[2:]}",
                lines,
                "quiet",
            )
        )
    asked = bool(answer.line)
    weights, lit = _weights(answer)
    for name, some in bucketed(answer.versions, lambda version: version.version):
        made.nodes.append(_version_node(name, some, asked=asked))
        holds[f"v {name}"] = {version.version for version in some}
        for version in some:
            source = of_step.get(version.version)
            step = None if source is None else f"s {source[2:]}"
            made.join(step, f"v {name}", weight=weights.get(version.version, 1), focus=version.version in lit)
        if before is not None:
            made.join(before, f"v {name}")
    for one in answer.reached:
        later = sorted(set(one.carried) - set(one.trained))
        if later:
            name = f"v later {one.lineage}"
            left = tuple(f"{revert} went back to {to}" for revert, to in one.left)
            lines = ("built on it" if asked else "built on these", *left[:2])
            title = f"version{'s' if len(later) > 1 else ''} {span(later)}"
            made.nodes.append(Node(name, 5, title, lines, "quiet", (), (f"versions {ranges(later)}", *left)))
            last = next(reversed(holds), None)
            made.join(last, name)
            holds[name] = set(later)
    _fleets(made, answer, holds)


def _version_node(name: str, some: Sequence[VersionLine], *, asked: bool) -> Node:
    tone: Tone = "focus" if asked else "plain"
    if len(some) > 1:
        listed = listed_of(f"version {one.version}: {one.state_digest}" for one in some)
        stored = bytes_text(sum(one.stored_bytes for one in some))
        return Node(
            f"v {name}", 5, f"versions {name}", (f"{many(len(some), 'delta')}, {stored}",), tone, (), listed
        )
    one = some[0]
    if one.reverts_to is not None:
        how = f"the weights of version {one.reverts_to}"
    elif one.base_version is None:
        how = f"full snapshot, {bytes_text(one.stored_bytes)}"
    else:
        how = f"{one.kind} on {one.base_version}, {bytes_text(one.stored_bytes)}"
    listed = (f"state digest {one.state_digest}", f"manifest {one.manifest.key}")
    lines = (how, f"digest {one.state_digest[:12]}", f"published {clock(one.published_us)}")
    return Node(f"v {name}", 5, f"version {one.version}", lines, tone, (), listed)


def _fleets(made: Boxes, answer: Answer, holds: Mapping[str, set[int]]) -> None:
    by: dict[str, list[Serving]] = defaultdict(list)
    for one in answer.served:
        by[f"{one.fleet}/{one.replica}"].append(one)
    if len(by) > SOME:
        fleets: dict[str, list[Serving]] = defaultdict(list)
        for one in answer.served:
            fleets[one.fleet].append(one)
        largest = sorted(fleets.items(), key=lambda item: -len(item[1]))
        by = dict(largest[: SOME - 1])
        rest = [one for _, some in largest[SOME - 1 :] for one in some]
        if rest:
            by["other fleets"] = rest
    for name, some in by.items():
        served = {one.version for one in some}
        replicas = len({(one.fleet, one.replica) for one in some})
        until = None if any(one.until_us is None for one in some) else max(one.until_us or 0 for one in some)
        end = "when it reported last" if until is None else f"until {clock(until)}"
        lines = (
            f"version {span(served)}",
            f"from {clock(min(one.from_us for one in some))}",
            end,
            *((many(replicas, "replica"),) if replicas > 1 else ()),
        )
        listed = listed_of(
            f"{one.fleet}/{one.replica}: version {one.version} from {when(one.from_us)}"
            + (f" to {when(one.until_us)}" if one.until_us is not None else "")
            for one in some
        )
        made.nodes.append(Node(f"d {name}", 6, name, lines, "plain", (), listed))
        for version, numbers in holds.items():
            both = served & numbers
            if both:
                made.join(version, f"d {name}", weight=len(both))
