"""An answer of lineage as a layered graph for a picture: which boxes, with what in them, and what leads where. Pure.

Few rollouts are a box each. Of some groups, each group's rollouts share a box. Of many groups, boxes stand for what was
sampled by one version and for groups of one fate. A box's squares are its rollouts, so that however many there are each one's
reward is seen.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from rollwire.consumers.audit.lineage import Answer, FeedbackLine, GroupLine, RolloutLine
from rollwire.consumers.audit.versions import ranges
from rollwire.ops.lineage_boxes import (
    FEW,
    SOME,
    Boxes,
    Cell,
    Graph,
    Node,
    Tone,
    asked_for,
    bucketed,
    listed_of,
    short_of,
    span,
)
from rollwire.ops.lineage_outcome import training, versions
from rollwire.ops.lineage_text import clock, fate_text, many, when


def graph_of(answer: Answer) -> Graph:
    others = answer.reached[:-1]
    answer = _of_one_lineage(answer)
    focus = frozenset(answer.focus)
    if len(answer.rollouts) > FEW and all(asked_for(one, focus) for one in answer.rollouts):
        answer, focus = msgspec.structs.replace(answer, focus=()), frozenset[str]()  # nothing can stand out
    made = Boxes()
    groups = {one.group_id: one for one in answer.groups}
    of_rollout = _rollouts(made, answer, focus)
    _feedback(made, answer, of_rollout, focus)
    of_group = _groups(made, answer, focus)
    for one in answer.rollouts:
        made.join(of_rollout[one.rollout_id], of_group[one.group_id], focus=asked_for(one, focus))
    of_version = training(made, answer)
    for group in groups.values():
        if group.planned is not None:
            lit = any(asked_for(one, focus) for one in group.rollouts)
            made.join(of_group[group.group_id], of_version.get(group.planned), focus=lit)
    versions(made, answer, of_version)
    return Graph(
        title=f"{answer.asked[:1].upper()}{answer.asked[1:]}",
        facts=_facts(answer) + "".join(f" · it reached lineage {one.lineage} as well" for one in others),
        nodes=tuple(sorted(made.nodes, key=lambda node: node.column)),
        edges=made.edges,
        findings=len(answer.report.findings),
    )


def _facts(answer: Answer) -> str:
    parts = [f"model {answer.model}, lineage {answer.lineage}"] if answer.model else []
    parts += [many(len(answer.groups), "group"), many(len(answer.rollouts), "rollout")]
    said = sum(len(one.feedback) for one in answer.rollouts)
    if said:
        parts.append(many(said, "feedback event"))
    codes = sorted({step.code for step in answer.steps if step.code})
    if codes:
        parts.append(f"code {', '.join(codes[:2])}")
    return " · ".join(parts)


# -- rollouts and what was said about them -------------------------------------------------------------------------------


def _rollouts(made: Boxes, answer: Answer, focus: frozenset[str]) -> dict[str, str]:
    """Makes their boxes; the box of each rollout."""
    rollouts = answer.rollouts
    if len(rollouts) <= FEW:
        for one in rollouts:
            made.nodes.append(_single(one, focus))
        return {one.rollout_id: f"r {one.rollout_id}" for one in rollouts}
    by: dict[str, list[RolloutLine]] = defaultdict(list)
    if len(answer.groups) <= SOME:
        for one in rollouts:
            by[f"r {one.group_id}"].append(one)
    else:
        for name, some in bucketed(rollouts, lambda one: one.versions[0] if one.versions else -1):
            for one in some:
                by[f"r {one.environment} {name}"].append(one)
    for name, some in by.items():
        made.nodes.append(_several(name, some, focus, ordered=len(answer.groups) > SOME))
    return {one.rollout_id: name for name, some in by.items() for one in some}


def _single(one: RolloutLine, focus: frozenset[str]) -> Node:
    cell = _cell(one, focus)
    lines = [f"{_score(one)}, {one.environment}", f"by version {ranges(one.versions)} on {one.replica}"]
    if one.trained is False:
        lines.append("not trained on")
    if one.erased:
        lines.append("erased")
    return Node(
        f"r {one.rollout_id}",
        1,
        short_of(one.rollout_id),
        tuple(lines),
        "focus" if cell.focus else "plain",
        (cell,),
        (cell.tip,),
    )


def _several(name: str, some: Sequence[RolloutLine], focus: frozenset[str], *, ordered: bool) -> Node:
    cells = [_cell(one, focus) for one in some]
    if ordered:
        cells.sort(key=lambda cell: (cell.reward is None, -(cell.reward or 0.0)))
    scored = [cell.reward for cell in cells if cell.reward is not None]
    mean = f", mean reward {sum(scored) / len(scored):.2f}" if scored else ", unscored"
    versions = ranges({version for one in some for version in one.versions[:1]})
    environments = sorted({one.environment for one in some})
    lines = [f"{', '.join(environments)}{mean}", f"begun by version {versions}"]
    left = sum(one.trained is False for one in some)
    if left:
        lines.append(f"{left:,} not trained on")
    gone = sum(one.erased for one in some)
    if gone:
        lines.append(f"{gone:,} erased")
    return Node(
        name,
        1,
        many(len(some), "rollout"),
        tuple(lines),
        "plain",
        tuple(cells),
        listed_of(c.tip for c in cells),
    )


def _feedback(made: Boxes, answer: Answer, of_rollout: Mapping[str, str], focus: frozenset[str]) -> None:
    said = [one for rollout in answer.rollouts for one in rollout.feedback]
    # As their rollouts stand, so that lines cross little.
    if len(said) <= SOME:
        for one in said:
            lit = one.feedback_id in focus
            what = f"{one.signal} {one.said}".strip() or "a comment"
            who = f"by {one.subject[:8]}…" if one.subject else "by nobody named"
            lines = (
                f"{who}, {clock(one.received_us)}",
                f"{one.at.topic}[{one.at.partition}] {one.at.offset:,}",
            )
            made.nodes.append(
                Node(
                    f"f {one.feedback_id}",
                    0,
                    what,
                    lines,
                    "focus" if lit else "plain",
                    (),
                    (one.feedback_id,),
                )
            )
            made.join(f"f {one.feedback_id}", of_rollout[one.rollout_id], focus=lit)
        return
    by = defaultdict(list)
    for one in said:
        by[one.signal].append(one)
    largest = sorted(by.items(), key=lambda item: -len(item[1]))
    kept, rest = largest[: SOME - 1], [one for _, some in largest[SOME - 1 :] for one in some]
    for signal, some in [*kept, *([("other signals", rest)] if rest else [])]:
        people = len({one.subject for one in some if one.subject})
        lines = (_values(some), f"of {many(people, 'person', 'people')}")
        listed = listed_of(
            f"{one.feedback_id}: {one.signal} {one.said}, {when(one.received_us)}" for one in some
        )
        made.nodes.append(Node(f"f {signal}", 0, f"{len(some):,} × {signal}", lines, "plain", (), listed))
        for one in some:
            made.join(f"f {signal}", of_rollout[one.rollout_id], focus=one.feedback_id in focus)


def _values(some: Sequence[FeedbackLine]) -> str:
    """What was said, how often; of many numbers, from which to which."""
    counts = Counter(one.said or "a comment" for one in some)
    if len(counts) <= 3:
        return ", ".join(f"{value}: {count:,}" for value, count in counts.most_common())
    try:
        numbers = sorted(float(value) for value in counts)
    except ValueError:
        return f"{len(counts):,} different words"
    return f"from {numbers[0]:.3g} to {numbers[-1]:.3g}"


def _groups(made: Boxes, answer: Answer, focus: frozenset[str]) -> dict[str, str]:
    groups = answer.groups
    if len(groups) <= SOME:
        for group in groups:
            lit = any(asked_for(one, focus) for one in group.rollouts)
            lines = [fate_text(group)]
            if group.decided_us:
                lines.append(f"decided {clock(group.decided_us)}")
            if group.absent:
                lines.append(f"{len(group.absent):,} rollouts are missing")
            tone: Tone = "ended" if group.made is None else "focus" if lit else "plain"
            made.nodes.append(
                Node(
                    f"g {group.group_id}",
                    2,
                    short_of(group.group_id),
                    tuple(lines),
                    tone,
                    (),
                    (group.group_id,),
                )
            )
        return {group.group_id: f"g {group.group_id}" for group in groups}
    by: dict[str, list[GroupLine]] = defaultdict(list)
    trained = [group for group in groups if group.made is not None]
    for name, some in bucketed(trained, lambda group: group.made or 0):
        by[f"g trained {name}"] += some
    ended: dict[str, list[GroupLine]] = defaultdict(list)
    for group in groups:
        if group.made is None:
            ended[_end(group)].append(group)
    ends = sorted(ended.items(), key=lambda item: -len(item[1]))
    if len(ends) > SOME:
        rest = [group for _, some in ends[SOME - 1 :] for group in some]
        ends = [*ends[: SOME - 1], ("other fates", rest)]
    for name, some in (*by.items(), *((f"g {end}", some) for end, some in ends)):
        into = span({group.made for group in some if group.made is not None})
        missing = sum(len(group.absent) for group in some)
        size = missing + sum(len(group.rollouts) for group in some)
        rollouts = f"of {many(size, 'rollout')}" + (f", {missing:,} missing" if missing else "")
        made.nodes.append(
            Node(
                name,
                2,
                many(len(some), "group"),
                (f"trained into version {into}" if into else name[2:], rollouts),
                "plain" if into else "ended",
                (),
                listed_of(f"{group.group_id}: {fate_text(group)}" for group in some),
            )
        )
    by.update({f"g {end}": some for end, some in ends})
    return {group.group_id: name for name, some in by.items() for group in some}


def _end(group: GroupLine) -> str:
    """What became of a group that nothing was trained on, without what tells it from others of that fate."""
    return "counted, not trained on" if group.planned is not None else fate_text(group)


def _of_one_lineage(answer: Answer) -> Answer:
    """Numbers of versions are a lineage's own: where several were reached, the picture is of the last of them."""
    if len(answer.reached) <= 1:
        return answer
    of = answer.reached[-1].lineage
    return msgspec.structs.replace(
        answer,
        lineage=of,
        model=answer.reached[-1].model,
        groups=tuple(g for g in answer.groups if any(one.lineage == of for one in g.rollouts)),
        steps=tuple(one for one in answer.steps if one.lineage == of),
        versions=tuple(one for one in answer.versions if one.lineage == of),
        reached=answer.reached[-1:],
    )


def _cell(one: RolloutLine, focus: frozenset[str]) -> Cell:
    scored = [reward.reward for reward in one.rewards if reward.reward is not None]
    tip = f"{one.rollout_id}: {_score(one)}, sampled by version {ranges(one.versions)} on {one.fleet}/{one.replica}"
    if one.trained is False:
        tip += ", not trained on"
    if one.erased:
        tip += ", erased"
    return Cell(scored[-1] if scored else None, one.trained, one.erased, asked_for(one, focus), tip)


def _score(one: RolloutLine) -> str:
    scored = [reward for reward in one.rewards if reward.reward is not None]
    return f"reward {scored[-1].reward:.3g}" if scored else "no reward"
