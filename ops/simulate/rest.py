"""What must hold when everything is healed and nothing moves any more: the account, the replays, the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rollwire.consumers.audit.hours_book import Book
from rollwire.consumers.audit.hours_names import named
from rollwire.consumers.ledger import summed
from rollwire.ops.simulate.laws import CONSUMER, JOINED, LIVE, Laws, Limits, consumer_of, plan_key
from rollwire.ops.simulate.log import SimulatedLog
from rollwire.ops.simulate.workload import DEADLINE_S, LIVE_DEADLINE_S, Truth
from rollwire.ops.simulate.world import Violated
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import Refused
from rollwire.schemas.ids import opened_us
from rollwire.schemas.records import (
    DeadLetter,
    Event,
    Group,
    GroupFate,
    PackedBatch,
    ProductionRollout,
    Reward,
    Rollout,
    RoutingTrace,
)
from rollwire.streams.emit import decode_record, take
from rollwire.streams.seams.log import Record, TopicPartition
from rollwire.streams.step import Step

_WAITING: Final = ("groups",)  # what may wait for others of its kind: a plan is never smaller


def check_rest(
    laws: Laws,
    log: SimulatedLog,
    partitions: Mapping[str, int],
    truth: Mapping[str, Truth],
    limits: Limits,
    assemblers: Mapping[str, Callable[[int], Step]],
    now_us: int,
) -> None:
    """Raises `Violated`. `assemblers` make the step of one partition, as the processors have it, by name."""
    _nothing_open(laws, log, partitions, live="assemble-production" in assemblers)
    _account(laws, log, partitions, limits)
    _good_ones(laws, truth, now_us)
    for partition in range(partitions["rollouts"]):
        for name, assembler in assemblers.items():
            _replay(laws, name, assembler(partition), partition, now_us)


def _nothing_open(laws: Laws, log: SimulatedLog, partitions: Mapping[str, int], *, live: bool) -> None:
    """Law 8: every group that was heard of has met its end, and all input was read and committed."""
    places = [TopicPartition(topic, p) for topic in CONSUMER for p in range(partitions[topic])]
    places = [p for p in places if p.topic != "routing-traces" or laws.records[p.topic]]
    ends = log.end_offsets(places)
    readers = [(place, CONSUMER[place.topic]) for place in places]
    readers += [(place, LIVE) for place in places if live and place.topic == "rewards"]
    for place, consumer in readers:
        at = log.settled(consumer, [place]).get(place, 0)
        if place.topic in JOINED or place.topic == "packed-batches":
            # Control records may lie between the last event and the end.
            own = [r for r in laws.records[place.topic] if r.partition == place.partition]
            last = max((r.offset for r in own if not _passed_over(laws, r)), default=-1)
            if not last < at <= ends[place]:
                raise Violated(
                    "8",
                    f"at rest, {consumer} stands at {at} of {place.topic}[{place.partition}], whose last "
                    f"event is {last}",
                )


def _passed_over(laws: Laws, record: Record) -> bool:
    """A plan that nobody takes any more; what it stands before may not have come yet."""
    event = _event(record) if record.topic == "packed-batches" else None
    return isinstance(event, PackedBatch) and laws.passed_over(plan_key(event))


def _account(laws: Laws, log: SimulatedLog, partitions: Mapping[str, int], limits: Limits) -> None:
    """Law 7, added up by the ledger: nothing is missing, nothing too many, and only what must wait waits."""
    book = Book()
    for records in laws.records.values():
        for record in records:
            book.add(record)
    committed: dict[TopicPartition, int] = {}
    for topic, group in CONSUMER.items():
        committed |= log.settled(group, [TopicPartition(topic, p) for p in range(partitions[topic])])
    begins = {TopicPartition(topic, p): 0 for topic, count in partitions.items() for p in range(count)}
    live = log.settled(LIVE, [TopicPartition("rewards", p) for p in range(partitions["rewards"])])
    tally = book.close(committed, begins, live)
    ledger = summed(named(tally, lambda topic, _: laws.records[topic]))
    for flow in tally.flows:
        if flow.lost or flow.unstarted:
            raise Violated("7", f"the ledger: {flow.lost} {flow.flow} lost, {flow.unstarted} never started")
    for line in ledger.lines:
        if line.gap:
            raise Violated(
                "7", f"the ledger: {line.topic} misses {line.missing_ids}, has too much {line.extra_ids}"
            )
        if line.pending and line.topic not in _WAITING:
            raise Violated("7", f"the ledger: {line.pending} events of {line.topic} are pending at rest")
    waiting = laws.groups.keys() - laws.fates.keys() - _set_aside(laws)
    answers = sum(laws.groups[group_id].baseline == "cohort" for group_id in waiting)
    others, whole = len(waiting) - answers, limits.groups_per_step
    both = answers >= limits.answers and others >= whole - limits.answers
    if both or max(answers, others) >= whole:
        raise Violated(
            "8", f"{others} groups and {answers} answers wait for a plan of {whole}: {sorted(waiting)}"
        )


def _good_ones(laws: Laws, truth: Mapping[str, Truth], now_us: int) -> None:
    """Law 7: a group whose events are all good and came in time is kept by `assemble`, whatever stood beside them."""
    in_time: dict[str, set[tuple[str, int]]] = {}
    aside = _set_aside(laws)
    for topic in JOINED:
        for record in laws.records[topic]:
            event = _event(record)
            if isinstance(event, Rollout | Reward | RoutingTrace):
                live = isinstance(event, ProductionRollout) or consumer_of(topic, event) == LIVE
                deadline_us = opened_us(event.group_id) + round(
                    (LIVE_DEADLINE_S if live else DEADLINE_S) * 1e6
                )
                if record.timestamp_ms * 1_000 <= deadline_us:
                    index = int(event.rollout_id.rpartition(".")[2])
                    in_time.setdefault(event.group_id, set()).add((topic, index))
    for group_id, one in truth.items():
        source = "production-rollouts" if one.live else "rollouts"
        wanted = {(topic, r.index) for r in one.rollouts for topic in (source, "rewards")}
        wanted |= {("routing-traces", r.index) for r in one.rollouts if r.top_k_experts}
        whole = wanted <= in_time.get(group_id, set())
        outcome = laws.assembled.get(group_id)
        if group_id in aside:
            continue
        if (
            one.kind in ("good", "mixed", "stale", "future", "foreign", "answered", "silent", "ruled")
            and whole
            and not isinstance(outcome, Group)
        ):
            raise Violated("7", f"group {group_id} ({one.kind}) was whole in time, but became {outcome}")
        if group_id in in_time and outcome is None:
            raise Violated("8", f"group {group_id} ({one.kind}) never met an end")
    if any(opened_us(group) > now_us for group in laws.assembled):
        raise Violated("9", "a group was opened after the end")


def _replay(laws: Laws, name: str, step: Step, partition: int, now_us: int) -> None:
    """Law 9: the step of one kind of groups alone, fed whole topics one after the other, comes to the same outcomes."""
    step.start(dict.fromkeys(step.inputs, 0), {})
    said: dict[str, Any] = {}
    refused: dict[tuple[str, int], str] = {}
    for place in reversed(list(step.inputs)):
        own = [take(r) for r in laws.records[place.topic] if r.partition == partition]
        _note(step.feed(own, now_us), said, refused)
    _note(step.tick(now_us, step.inputs), said, refused)
    live = {
        group_id: _essence(outcome)
        for group_id, outcome in laws.assembled.items()
        if _kind_of(outcome) == name and any(at.partition == partition for at in outcome.cut.inputs)
    }
    for group_id in sorted((live.keys() | said.keys()) - _set_aside(laws)):
        if live.get(group_id) != said.get(group_id):
            raise Violated(
                "9", f"group {group_id}: {live.get(group_id)} was said, a replay says {said.get(group_id)}"
            )
    aside = {(t, o) for (t, p, o), d in laws.refused.items() if d.reason == "kills_worker"}
    seen = {
        (t, o): d.reason
        for (t, p, o), d in laws.refused.items()
        if t in JOINED and p == partition and d.refused_by == name
    }
    # What is bad in itself is refused whenever it is read: for its own reason, or because it came too late.
    odd = {at for at, reason in refused.items() if reason != "late"} - seen.keys()
    odd |= {at for at, reason in seen.items() if reason != "late"} - refused.keys()
    if odd - aside:
        raise Violated("7", f"refused in one of two replays only: {sorted(odd)}")


def _set_aside(laws: Laws) -> set[str]:
    """Groups of which a record was taken for deadly: nobody knows what would have become of them."""
    bad = {at for at, letter in laws.refused.items() if letter.reason == "kills_worker"}
    records = [
        r
        for topic in (*JOINED, "groups")
        for r in laws.records[topic]
        if (topic, r.partition, r.offset) in bad
    ]
    return {
        event.group_id for r in records if isinstance(event := _event(r), Rollout | Reward | RoutingTrace)
    }


def _note(outputs: Sequence[Any], said: dict[str, Any], refused: dict[tuple[str, int], str]) -> None:
    for out in outputs:
        event = decode_record(Record(out.topic, 0, 0, 0, out.key, out.value, out.headers))
        if isinstance(event, Group | GroupFate):
            said[event.group_id] = _essence(event)
        elif isinstance(event, DeadLetter):
            refused[event.source.topic, event.source.offset] = event.reason


def _kind_of(outcome: Group | GroupFate) -> str:
    """Whose outcome it is."""
    if isinstance(outcome, GroupFate):
        return outcome.decided_by
    return "assemble-production" if outcome.baseline == "cohort" else "assemble"


def _essence(outcome: Group | GroupFate) -> Any:
    """Without what depends on when it was said."""
    if isinstance(outcome, Group):
        return outcome.members
    return outcome.fate, outcome.reason, outcome.members, outcome.reward_mean


def _event(record: Record) -> Event | None:
    try:
        return decode_record(record)
    except Refused:
        return None


def topics(joined: int, ranks: int) -> dict[str, int]:
    """Every topic of the catalogue, small."""
    counts = dict.fromkeys(TOPICS, 1)
    counts |= dict.fromkeys(
        (*JOINED, "groups", "group-fates", "groups-closed", "production-groups-closed"), joined
    )
    return counts | {"packed-batches": ranks}
