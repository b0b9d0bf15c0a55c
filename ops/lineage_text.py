"""An answer of lineage as a tree that people read. Long lists are cut, and say how much more there is; the JSON has all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Final, TypeVar

from rich.text import Text
from rich.tree import Tree

from rollwire.consumers.audit.lineage import (
    Answer,
    FeedbackLine,
    GroupLine,
    RewardLine,
    RolloutLine,
    Serving,
    StepLine,
    VersionLine,
)
from rollwire.consumers.audit.versions import ranges
from rollwire.schemas.records import Position

SHOWN: Final = 6  # of a list: as many lines, then how many more there are
_SETTINGS: Final = ("torch", "cpu", "threads", "ranks", "learner", "OMP_NUM_THREADS", "seed")
T = TypeVar("T")


def draw_answer(answer: Answer, shown: int = SHOWN) -> Tree:
    """A tree; `shown` bounds every list in it."""
    tree = Tree(_line(answer.asked, "bold") + _of(answer), guide_style="dim")
    if answer.line:
        _version(tree, answer, shown)
    else:  # from what was asked for to what it reached
        _groups(tree, answer, shown)
    for step in answer.steps[:shown]:
        _step(tree, answer, step, whole=len(answer.steps) == 1)
    _more(tree, len(answer.steps) - shown, "steps")
    if answer.line:
        _groups(tree, answer, shown)
    _reached(tree, answer)
    _served(tree, answer.served, shown)
    return tree


def _version(tree: Tree, answer: Answer, shown: int) -> None:
    version = answer.versions[0]
    branch = tree.add(_weights(version))
    branch.add(f"state digest {version.state_digest}")
    branch.add(f"manifest {version.manifest.key}")
    for name, claim in (("anchor", version.anchor), ("checkpoint", version.checkpoint)):
        if claim is not None and claim != version.manifest:
            branch.add(f"{name} {claim.key}")
    if answer.way:
        way = branch.add(
            f"rebuilt from the store by {bytes_text(sum(one.bytes for one in answer.way))}: {way_text(answer)}"
        )
        missing = [one for one in answer.objects if not one.there]
        way.add(
            f"{len(answer.objects):,} objects looked for, "
            + (f"{len(missing):,} are missing" if missing else "all are there")
        )
    made = len(answer.line) - 1
    if made:
        line = ranges(answer.line[:-1])
        branch.add(
            f"made through version{'s' if made > 1 else ''} {line}: `--version N` shows what each took in"
        )


def _weights(version: VersionLine) -> Text:
    if version.reverts_to is not None:
        made = f"goes back to version {version.reverts_to}"
    elif version.base_version is None:
        made = "a full snapshot"
    else:
        changed = 100 * version.changed_elements / max(1, version.total_elements)
        made = f"{version.kind} on version {version.base_version}, {changed:.2g} % of the elements changed"
    return _line(
        f"weights: {made}, {bytes_text(version.stored_bytes)} stored of {bytes_text(version.full_bytes)}; "
        f"published {when(version.published_us)}"
    ) + place(version.at)


def way_text(answer: Answer) -> str:
    """anchor 0, 12 deltas"""
    parts: list[str] = []
    for kind, group in _grouped(answer.way, lambda one: one.kind):
        last = group[-1].version
        parts.append(f"{kind} {last}" if len(group) == 1 else f"{len(group)} {kind}s")
    return ", ".join(parts)


def _step(tree: Tree, answer: Answer, step: StepLine, *, whole: bool) -> None:
    if step.reverts_to is not None:
        by, why = step.settings.get("by", ""), step.settings.get("why", "")
        said = f", by {by}{f': {why}' if why else ''}" if by else ""
        tree.add(_line(f"step {step.step} reverts to version {step.reverts_to}{said}") + place(step.at))
        return
    figures = "" if step.loss is None else f", loss {step.loss:.4g}"
    branch = tree.add(
        _line(
            f"step {step.step}: version {step.base_version} → {step.version}, {step.groups:,} groups, "
            f"{step.sequences:,} sequences, {step.trained_tokens:,} tokens trained, reward {step.reward_mean:.3g}{figures}, "
            f"lag {step.max_lag}; {when(step.finished_us)}"
        )
        + place(step.at)
    )
    if not whole:
        return
    if step.erased_sequences:
        branch.add(f"{step.erased_sequences:,} sequences were left out: their people were erased before")
    consumed = ", ".join(f"{r.topic}[{r.partition}] {r.start:,} to {r.end - 1:,}" for r in step.consumed)
    sources = {
        "packed-batches": "read from there",
        "group-fates": "gone; its groups are known by their fates",
        "none": "gone",
    }
    branch.add(f"plan {step.plan_digest[:16]} {sources[step.plan_from]}: {consumed or 'nothing consumed'}")
    known = {name: step.settings[name] for name in _SETTINGS if name in step.settings}
    branch.add(
        f"code {step.code or 'not recorded'}"
        + "".join(f", {name} {value}" for name, value in known.items())
        + f"; learning rate {step.learning_rate:g}"
    )
    for one in answer.decided_by:
        branch.add(
            _line(
                f"{one.processor} by settings {one.digest[:16]}, code {one.code}, since {when(one.since_us)}"
            )
            + place(one.at)
        )


def _groups(tree: Tree, answer: Answer, shown: int) -> None:
    if not answer.groups:
        return
    rollouts = answer.rollouts
    trained = sum(one.trained is True for one in rollouts)
    said = sum(len(one.feedback) for one in rollouts)
    head = f"{many(len(answer.groups), 'group')} of {many(len(rollouts), 'rollout')}"
    if trained:
        head += f", {trained:,} of them trained on"
    if said:
        head += f", {many(said, 'feedback event')}"
    branch = tree.add(head)
    focus = set(answer.focus)
    # What was asked for comes first.
    ordered = sorted(answer.groups, key=lambda group: not _holds(group, focus))
    for group in ordered[:shown]:
        _group(branch, group, focus, shown)
    _more(branch, len(ordered) - shown, "groups")


def _group(tree: Tree, group: GroupLine, focus: set[str], shown: int) -> None:
    fate = fate_text(group)
    scored = [r.reward for one in group.rollouts for r in one.rewards if r.reward is not None]
    mean = f", mean reward {sum(scored) / len(scored):.3g}" if scored else ""
    decided = f"; {when(group.decided_us)}" if group.decided_us else ""
    branch = tree.add(_line(f"group {group.group_id}: {fate}{mean}{decided}") + place(group.at))
    ordered = sorted(group.rollouts, key=lambda one: not _asked(one, focus))
    for one in ordered[:shown]:
        _rollout(branch, one, focus, shown)
    _more(branch, len(ordered) - shown, "rollouts")
    if group.absent:
        branch.add(_line(f"{len(group.absent):,} rollouts are neither in log nor archive", "red"))


def _rollout(tree: Tree, one: RolloutLine, focus: set[str], shown: int) -> None:
    score = ", ".join(_reward(reward) for reward in one.rewards) or "no reward"
    by = f"version {ranges(one.versions)}" if one.versions else "no version"
    trained = {True: "", False: "; not trained on", None: ""}[one.trained]
    whose = f"; of {one.subject[:8]}…{', erased' if one.erased else ''}" if one.subject else ""
    branch = tree.add(
        _line(
            f"{one.rollout_id}: {score}; {one.environment}, {one.tokens:,} tokens by {by} on "
            f"{one.fleet}/{one.replica}{whose}{trained}",
            "bold" if _asked(one, focus) else "",
        )
        + place(one.at)
    )
    for said in one.feedback[:shown]:
        branch.add(_feedback(said, focus))
    _more(branch, len(one.feedback) - shown, "feedback events")


def _reward(reward: RewardLine) -> str:
    value = "unscored" if reward.reward is None else f"reward {reward.reward:.3g}"
    by = ""
    if reward.source == "user":
        by = f" of {many(len(reward.evidence), 'signal')}" if reward.evidence else ", no signal"
    return f"{value}{by} ({reward.source}{f': {reward.outcome}' if reward.outcome else ''})"


def _feedback(said: FeedbackLine, focus: set[str]) -> Text:
    what = f"{said.signal} {said.said}".strip() or "a comment"
    who = f" by {said.subject[:8]}…" if said.subject else ""
    text = f"feedback {said.feedback_id}: {what}{who}; {when(said.received_us)}"
    return _line(text, "bold" if said.feedback_id in focus else "") + place(said.at)


def _reached(tree: Tree, answer: Answer) -> None:
    for one in answer.reached:
        later = sorted(set(one.carried) - set(one.trained))
        if answer.line:
            text = f"versions built on it: {ranges(later)}" if later else "no later version is built on it"
        else:
            text = f"reached versions {ranges(one.carried)}: trained into {ranges(one.trained)}"
        branch = tree.add(f"{text}; the newest of lineage {one.lineage[:13]} is {one.newest}")
        for revert, to in one.left:
            branch.add(f"version {revert} went back to {to}: it and what is built on it carry none of it")
    if not answer.reached and answer.groups:
        tree.add("no version was trained on it")


def _served(tree: Tree, served: Sequence[Serving], shown: int) -> None:
    if not served:
        return
    replicas = {(one.fleet, one.replica) for one in served}
    branch = tree.add(f"served by {many(len(replicas), 'replica')}")
    grouped = _grouped(served, lambda one: f"{one.fleet}/{one.replica}")
    for name, some in grouped[:shown]:
        versions = ranges(sorted({one.version for one in some}))
        until = some[-1].until_us
        end = f"to {when(until)}" if until is not None else "and when it reported last"
        branch.add(f"{name}: version {versions}, from {when(some[0].from_us)} {end}")
    _more(branch, len(grouped) - shown, "replicas")


def fate_text(group: GroupLine) -> str:
    if group.made is not None:
        return f"trained into version {group.made}"
    if group.planned is not None:
        return f"counted in the plan of version {group.planned}, nothing of it trained on"
    if group.fate == "kept":
        return "planned, and never trained on"
    return f"{group.fate}: {group.reason}" if group.fate else "not decided"


def many(count: int, one: str, several: str | None = None) -> str:
    return f"{count:,} {one}" if count == 1 else f"{count:,} {several or one + 's'}"


def when(us: int) -> str:
    return datetime.fromtimestamp(us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S") + "Z"


def clock(us: int) -> str:
    return datetime.fromtimestamp(us / 1e6, UTC).strftime("%H:%M:%SZ")


def place(at: Position | None) -> Text:
    """Where it stands in the log."""
    return Text("" if at is None else f"  {at.topic}[{at.partition}] {at.offset:,}", style="dim")


def _of(answer: Answer) -> Text:
    return Text(f" of model {answer.model}, lineage {answer.lineage}" if answer.model else "")


def _asked(one: RolloutLine, focus: set[str]) -> bool:
    return one.rollout_id in focus or any(said.feedback_id in focus for said in one.feedback)


def _holds(group: GroupLine, focus: set[str]) -> bool:
    return any(_asked(one, focus) for one in group.rollouts)


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style)


def _more(tree: Tree, more: int, what: str) -> None:
    if more > 0:
        tree.add(_line(f"and {more:,} more {what}", "italic dim"))


def _grouped(items: Iterable[T], key: Callable[[T], str]) -> list[tuple[str, list[T]]]:
    """Neighbours of one key together, in order."""
    found: list[tuple[str, list[T]]] = []
    for item in items:
        name = key(item)
        if found and found[-1][0] == name:
            found[-1][1].append(item)
        else:
            found.append((name, [item]))
    return found


def bytes_text(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
