"""Lineage, read from the log and the store alone: where a version came from, where an event or a person's data went.

First the topics about versions, which are small; then, topic by topic, what stands there about the groups that matter. A
record of any other group is passed by without being decoded, and memory is that of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from rollwire.consumers.audit.beginnings import cut_beginnings, versions_gone
from rollwire.consumers.audit.lineage import Answer
from rollwire.consumers.audit.lineage_answer import Facts, Made, answer, trained_on
from rollwire.consumers.audit.lineage_events import KEYED, Gathered, Letters, Plan, Plans
from rollwire.consumers.audit.lineage_store import look
from rollwire.consumers.audit.versions import TOPICS, VersionBook, position_of, ranges
from rollwire.schemas.errors import Refused
from rollwire.schemas.ids import parse_rollout_id
from rollwire.schemas.records import (
    DeadLetter,
    Event,
    Feedback,
    GroupFate,
    Position,
    ProductionRollout,
    TrainStep,
    WeightVersion,
)
from rollwire.streams.emit import decode_record, deletes
from rollwire.streams.findings import Finding, Kind, at, gap, undecodable
from rollwire.streams.seams.log import Log, Record, TopicPartition
from rollwire.streams.seams.places import exists, partitions_of, size_of
from rollwire.streams.seams.scan import Lost, scan
from rollwire.streams.seams.store import ObjectStore

Progress = Callable[[str, int, int], None]
"""What is read, how many of its records were, of how many (about)."""

BATCHES: Final = "packed-batches"
CONFIRMED_STEPS: Final = 64
"""Of more steps than this, reached by one person say, the plans are not read: the fates say which groups were in them."""
_TOLD_EVERY: Final = 2_000  # records


def _silent(what: str, done: int, of: int) -> None:
    pass


class Tracer:
    """Answers one question; make a new one for the next. `store` may be None: then objects are not looked for.

    Raises what the log and the store raise when they are away; whatever is wrong with the history is a finding.
    """

    def __init__(self, log: Log, store: ObjectStore | None, progress: Progress = _silent) -> None:
        self._log = log
        self._store = store
        self._progress = progress
        self._findings: dict[Finding, None] = {}
        self._notes: dict[str, None] = {}
        self._undecodable: dict[Position, Finding] = {}
        self._records = 0
        self._book = VersionBook()

    def version(self, version: int, lineage: str | None = None) -> Answer:
        """What `version` was made from. `lineage`: its id or the beginning of it; None = the one that was started last."""
        book = self._read_versions()
        name = self._lineage(lineage)
        facts = Facts(f"version {version}", book, Gathered(set()), lineage=name, version=version)
        published = book.versions.get(name, {}).get(version)
        if published is None:
            self._unknown_version(name, version)
            return self._answer(facts)
        taken = book.steps.get(name, {}).get(version)
        step = None if taken is None else taken.event
        self._check_step(published.event, step)
        if step is not None:
            facts = self._of_step(facts, step)
        if self._store is not None:
            self._progress("looking at objects", 0, 0)
            stored = look(self._store, book.of(name), book.links.of(name), version, step)
            self._findings.update(dict.fromkeys(stored.findings))
            self._notes.update(dict.fromkeys(stored.notes))
            facts = facts._replace(stored=stored, checked={"objects": len(stored.objects)})
        return self._answer(facts)

    def rollout(self, rollout_id: str, lineage: str | None = None) -> Answer:
        """What became of a rollout, and of its group."""
        book = self._read_versions()
        facts = Facts(f"rollout {rollout_id}", book, Gathered(set()), focus=frozenset({rollout_id}))
        try:
            group, _ = parse_rollout_id(rollout_id)
        except Refused as refused:
            self._unknown_event(facts.asked, f"it is no rollout's id: {refused.detail}")
            return self._answer(facts)
        facts = self._forward(facts, {group}, lineage)
        if rollout_id not in facts.gathered.rollouts:
            self._unknown_event(facts.asked, "it is neither in rollouts nor in production-rollouts")
        self._letters({rollout_id})
        return self._answer(facts)

    def feedback(self, feedback_id: str, lineage: str | None = None) -> Answer:
        """What became of something that somebody said; `feedback_id` as its sender chose it, or `<tenant>/<id>`."""
        book = self._read_versions()
        tenant, _, name = feedback_id.rpartition("/")
        found = {
            event.rollout_id: event.group_id
            for event in self._naming("user-feedback", name)
            if isinstance(event, Feedback) and event.feedback_id == name and tenant in ("", event.tenant)
        }
        facts = Facts(f"feedback {feedback_id}", book, Gathered(set()), focus=frozenset({name}))
        if not found:
            self._unknown_event(facts.asked, "it is not in user-feedback")
            return self._answer(facts)
        facts = self._forward(facts, set(found.values()), lineage)
        self._letters({name, *found})
        return self._answer(facts)

    def person(self, subject: str, lineage: str | None = None) -> Answer:
        """What a person's data reached: what they said, and their own live traffic. `subject` is their pseudonym."""
        book = self._read_versions()
        groups: set[str] = set()
        focus: set[str] = set()
        for event in self._naming("user-feedback", subject):
            if isinstance(event, Feedback) and event.subject == subject:
                groups.add(event.group_id)
                focus.add(event.feedback_id)
        for event in self._naming("production-rollouts", subject):
            sealed = event.sealed if isinstance(event, ProductionRollout) else None
            if isinstance(event, ProductionRollout) and sealed is not None and sealed.subject == subject:
                groups.add(event.group_id)
                focus.add(event.rollout_id)
        facts = Facts(f"person {subject}", book, Gathered(set()), focus=frozenset(focus))
        if not groups:
            self._unknown_event(facts.asked, "nothing they said and no live traffic of theirs is in the log")
        erasure = book.erased.get(subject)
        if erasure is not None:
            self._notes[
                f"erased: keys 1 to {erasure.generations} of {subject} were destroyed, request {erasure.request_id}"
            ] = None
        return self._answer(self._forward(facts, groups, lineage))

    # -- the two directions ------------------------------------------------------------------------------------------

    def _of_step(self, facts: Facts, step: TrainStep) -> Facts:
        """Backwards: the groups that a step took in, and everything about them."""
        made = (step.lineage, step.version)
        facts = facts._replace(steps=(made,))
        if "revert_to" in step.settings:
            return facts
        plans = self._plans([step])
        if made in plans:
            groups = set(plans[made].groups)
        else:
            groups = self._groups_by_fates(step)
            source = (
                f"{len(groups):,} groups are known by their fates"
                if groups
                else "nor do fates name its groups"
            )
            self._notes[f"the plan of step {step.step} is not in {BATCHES} any more; {source}"] = None
            if not groups and step.groups:
                self._find(
                    Kind.HISTORY_GAP,
                    f"step {step.step}",
                    f"neither its plan nor the fates of its {step.groups:,} groups are in log or archive",
                )
        gathered = self._gather(groups)
        return facts._replace(gathered=gathered, plans=plans, planned=dict.fromkeys(groups, made))

    def _forward(self, facts: Facts, groups: set[str], lineage: str | None) -> Facts:
        """Forwards: everything about `groups`, and what they were trained into."""
        gathered = self._gather(groups)
        asked = "" if lineage is None else self._lineage(lineage)
        of = {one.group_id: one.lineage for one in gathered.rollouts.values()}
        planned: dict[str, Made] = {}
        for group, decided in gathered.fates.items():
            # Where the rollouts are gone the newest lineage is the best that is known.
            name = of.get(group) or self._book.newest_lineage() or ""
            version = self._book.made_by(name, decided.event)
            if version is not None and asked in ("", name):
                planned[group] = (name, version)
        steps = tuple(sorted(set(planned.values())))
        plans: dict[Made, Plan] = {}
        if len(steps) <= CONFIRMED_STEPS:
            plans = self._plans([self._book.steps[name][version].event for name, version in steps])
        else:
            self._notes[
                f"the plans of {len(steps):,} steps were not read: which rollouts of a group they laid out is not said"
            ] = None
        facts = facts._replace(gathered=gathered, lineage=asked, planned=planned, plans=plans)
        return facts._replace(steps=tuple(sorted(set(trained_on(facts).values()))))

    # -- reading -----------------------------------------------------------------------------------------------------

    def _read_versions(self) -> VersionBook:
        self._findings.update(dict.fromkeys(cut_beginnings(self._log, TOPICS)))
        for topic in TOPICS:
            for record in self._scan(topic):
                event = self._event(record)
                if event is not None:
                    self._book.add(record, event)
        return self._book

    def _gather(self, groups: set[str]) -> Gathered:
        gathered = Gathered(groups)
        for topic in KEYED if groups else ():
            for record in self._scan(topic):
                if gathered.wants(record) and (event := self._event(record)) is not None:
                    gathered.add(record, event)
        return gathered

    def _naming(self, topic: str, name: str) -> Iterator[Event]:
        """Events in whose bytes `name` stands."""
        needle = name.encode()
        for record in self._scan(topic):
            if record.value is not None and needle in record.value:
                event = self._event(record)
                if event is not None:
                    yield event

    def _groups_by_fates(self, step: TrainStep) -> set[str]:
        """The groups that a step trained on, where its plan is gone."""
        found: set[str] = set()
        for record in self._scan("group-fates"):
            event = self._event(record)
            if (
                isinstance(event, GroupFate)
                and event.for_version == step.base_version
                and self._book.made_by(step.lineage, event) == step.version
            ):
                found.add(event.group_id)
        lineages = len(self._book.versions)
        if found and lineages > 1:  # a fate names a version's number and no lineage: its rollouts do
            other = {
                one.group_id for one in self._gather(found).rollouts.values() if one.lineage != step.lineage
            }
            found -= other
        return found

    def _plans(self, steps: list[TrainStep]) -> dict[Made, Plan]:
        """The plans of `steps`, of which all ranks' records were read. What is amiss with one is noted."""
        plans = Plans(steps)
        wanted = [
            one for step in steps for one in step.consumed if one.topic == BATCHES and one.start < one.end
        ]
        if not wanted or not exists(self._log, BATCHES):
            return {}
        partitions = partitions_of(self._log, [BATCHES])
        begins, ends = self._log.beginning_offsets(partitions), self._log.end_offsets(partitions)
        start, until = dict(ends), dict[TopicPartition, int]()
        for one in wanted:
            place = TopicPartition(one.topic, one.partition)
            if place in begins:
                start[place] = min(start[place], max(one.start, begins[place]))
                until[place] = max(until.get(place, 0), one.end)
        for record in self._scan(BATCHES, start=start, until=until):
            if (event := self._event(record)) is not None:
                plans.add(event)
        found: dict[Made, Plan] = {}
        for step in steps:
            plan, missing = plans.of(step), plans.missing(step)
            kept = all(
                one.start >= begins.get(TopicPartition(one.topic, one.partition), one.end)
                for one in step.consumed
            )
            if plan is not None and not missing:
                found[step.lineage, step.version] = plan
            elif kept and "revert_to" not in step.settings:
                self._find(
                    Kind.DIGEST_DIFFERS,
                    f"step {step.step}",
                    f"of the {len(step.consumed)} records that it says it consumed, {missing} hold no plan of digest "
                    f"{step.plan_digest[:16]}: another trainer's, or {BATCHES} is not what it was",
                )
        return found

    def _letters(self, ids: set[str]) -> None:
        """Whether what was asked for was refused: that is the end of its way, and no fault of the history."""
        letters = Letters(ids)
        for record in self._scan("dead-letters"):
            if letters.wants(record) and (event := self._event(record)) is not None:
                letters.add(record, event)
        for letter, _ in letters.found:
            source = letter.source
            self._notes[
                f"{letter.refused_by} refused {at(source.topic, source.partition, source.offset)}: "
                f"{letter.reason}: {letter.detail}"
            ] = None

    def _settle_undecodable(self) -> None:
        """What a processor refused stands in `dead-letters`: it is accounted for. Anything else is a finding."""
        letters: set[Position] = set()
        for record in self._scan("dead-letters") if self._undecodable else ():
            event = self._event(record)
            if isinstance(event, DeadLetter):
                letters.add(event.source)
        left = {position: one for position, one in self._undecodable.items() if position not in letters}
        refused = len(self._undecodable) - len(left)
        if refused:
            self._notes[f"{refused:,} records on the way were refused, and stand in dead-letters"] = None
        self._findings.update(dict.fromkeys(left.values()))

    def _scan(
        self,
        topic: str,
        *,
        start: dict[TopicPartition, int] | None = None,
        until: dict[TopicPartition, int] | None = None,
    ) -> Iterator[Record]:
        """`until`: reading ends when every partition named there was read up to it."""
        if not exists(self._log, topic):
            return
        total = size_of(self._log, [topic]) if start is None else 0
        waiting = set(until or ())
        self._progress(topic, 0, total)
        for done, record in enumerate(scan(self._log, (topic,), start=start, lost=self._lost)):
            place = TopicPartition(record.topic, record.partition)
            if until is not None and record.offset >= until.get(place, 0):
                waiting.discard(place)
                if not waiting:
                    return
                continue
            self._records += 1
            if done % _TOLD_EVERY == 0:
                self._progress(topic, min(done, total), total)
            yield record
        self._progress(topic, total, total)

    def _event(self, record: Record) -> Event | None:
        if deletes(record):
            return None
        try:
            return decode_record(record)
        except Refused as refused:
            self._undecodable[position_of(record)] = undecodable(record, refused)
            return None

    # -- what is said about it ---------------------------------------------------------------------------------------

    def _lineage(self, lineage: str | None) -> str:
        """The id of the lineage meant; what is not known stays as it was given."""
        if lineage is None:
            return self._book.newest_lineage() or ""
        alike = [one for one in self._book.versions if one.startswith(lineage)]
        return alike[0] if len(alike) == 1 else lineage

    def _unknown_version(self, name: str, version: int) -> None:
        known = self._book.versions.get(name)
        said = f"known of it are {ranges(known)}" if known else "nothing of it is known"
        others = [
            f"{one[:13]} ({ranges(numbers)})" for one, numbers in self._book.versions.items() if one != name
        ]
        more = f"; other lineages: {', '.join(others)}" if others else ""
        where = f"version {version} of lineage {name or '(none)'}"
        # Numbers have no holes, and begin with 0.
        if (known and 0 <= version < max(known)) or (not known and versions_gone(self._findings)):
            self._find(
                Kind.HISTORY_GAP, where, f"its event is neither in the log nor in the archive: {said}{more}"
            )
        else:
            self._find(Kind.VERSION_UNKNOWN, where, f"it was never published: {said}{more}")

    def _unknown_event(self, asked: str, why: str) -> None:
        self._find(
            Kind.EVENT_UNKNOWN,
            asked,
            f"{why}, as far back as log and archive reach: is the id spelled as there?",
        )

    def _check_step(self, version: WeightVersion, step: TrainStep | None) -> None:
        name = f"version {version.version}"
        if step is None and self._book.steps.get(version.lineage) and version.step > 0:
            self._find(Kind.HISTORY_GAP, name, f"train-steps has no step {version.step}, which made it")
        elif step is None and version.step > 0:
            self._notes[
                f"{name} was published without a step in train-steps: its trainer consumes no plans of this log"
            ] = None
        elif step is None:
            self._notes[f"{name} is the beginning: no training made it"] = None
        elif step.state_digest != version.state_digest:
            self._find(
                Kind.DIGEST_DIFFERS,
                name,
                f"weight-versions says {version.state_digest[:16]}, the step that made it {step.state_digest[:16]}",
            )
        base = version.base_version
        if base is not None and base not in self._book.versions[version.lineage]:
            self._find(Kind.HISTORY_GAP, name, f"its base, version {base}, is not in weight-versions")

    def _lost(self, lost: Lost) -> None:
        self._findings[gap(lost.partition.topic, lost.partition.partition, lost.first, lost.next)] = None

    def _find(self, kind: Kind, where: str, detail: str) -> None:
        self._findings[Finding(kind=kind, where=where, detail=detail)] = None

    def _answer(self, facts: Facts) -> Answer:
        self._settle_undecodable()
        return answer(
            facts._replace(
                findings=tuple(self._findings),
                notes=tuple(self._notes),
                checked={"records": self._records, **facts.checked},
            )
        )
