"""The second look: whatever an account found missing or too many is read again, and named by its event id and place.

An account keeps numbers alone; only what is wrong is worth a name. Where nothing is wrong, nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from rollwire.consumers.audit.hours import Difference, HourLedger, Wrong, hour_name, hour_of
from rollwire.consumers.audit.hours_book import Tally
from rollwire.consumers.audit.hours_columns import packed, unpacked
from rollwire.schemas.errors import Refused
from rollwire.schemas.records import Event, Group, GroupFate
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.log import Record, TopicPartition

Read = Callable[[str, Mapping[TopicPartition, int]], Iterable[Record]]
"""The records of one topic: none named, all of them; else those from these places on, of no other partition."""


class _Seen(NamedTuple):
    event_id: str
    why: str = ""  # it does not decode; "" = it does
    reason: str = ""  # the code of that


def named(tally: Tally, read: Read) -> HourLedger:
    """The account with its differences. Raises what `read` raises."""
    wanted: dict[str, set[int]] = {}
    for missing in tally.missing:
        wanted.setdefault(missing.topic, set()).add(missing.place)
    for extra in tally.extra:
        if extra.place is not None and not extra.event_id:
            wanted.setdefault(extra.topic, set()).add(extra.place)
    seen = {
        (topic, place): one for topic, places in wanted.items() for place, one in _look(topic, places, read)
    }
    differences: list[Difference] = []
    for missing in tally.missing:
        one = seen.get((missing.topic, missing.place), _Seen("", "it is not there any more"))
        detail = one.why or "accepted, refused, shed and pending: none of them"
        differences.append(
            _difference(
                "missing", missing.topic, missing.hour, missing.place, one.event_id, detail, one.reason
            )
        )
    for extra in tally.extra:
        event_id = extra.event_id
        if not event_id and extra.place is not None:
            event_id = seen.get((extra.topic, extra.place), _Seen("")).event_id
        differences.append(_difference("extra", extra.topic, extra.hour, extra.place, event_id, extra.detail))
    differences += _of_nothing(tally, read)
    differences.sort(key=lambda one: (one.topic, one.partition or 0, one.offset or 0, one.wrong, one.detail))
    return HourLedger(
        lines=tally.lines,
        flows=tally.flows,
        differences=tuple(differences),
        lapsed=dict(tally.lapsed),
    )


def _difference(
    wrong: Wrong, topic: str, hour: int, place: int | None, event_id: str, detail: str, reason: str = ""
) -> Difference:
    partition, offset = (None, None) if place is None else unpacked(place)
    return Difference(
        wrong=wrong,
        topic=topic,
        hour=hour_name(hour),
        event_id=event_id,
        detail=detail,
        partition=partition,
        offset=offset,
        reason=reason,
    )


def _look(topic: str, places: set[int], read: Read) -> Iterable[tuple[int, _Seen]]:
    """Reads from the first of the places until all were seen."""
    left = set(places)
    start: dict[TopicPartition, int] = {}
    for place in sorted(left, reverse=True):
        partition, offset = unpacked(place)
        start[TopicPartition(topic, partition)] = offset
    for record in read(topic, start):
        place = packed(record.partition, record.offset)
        if place in left:
            left.discard(place)
            yield place, _seen(record)
            if not left:
                return


def _seen(record: Record) -> _Seen:
    value = next((value for name, value in record.headers if name == "ce_id"), None)
    event_id = "" if value is None else value.decode(errors="replace")
    try:
        decode_record(record)
    except Refused as refused:
        return _Seen(event_id, f"it does not decode, and nobody refused it: {refused}", refused.reason)
    return _Seen(event_id)


def _of_nothing(tally: Tally, read: Read) -> list[Difference]:
    """Groups and fates that name rollouts that do not exist, or close what never started."""
    rollouts = {one.key for one in tally.unfounded}
    found: list[Difference] = []
    if not rollouts and not tally.unstarted:
        return found
    for topic in ("groups", "group-fates"):
        for record in read(topic, {}):
            try:
                event = decode_record(record)
            except Refused:
                continue
            group_id, members = _names(event)
            place, hour = packed(record.partition, record.offset), hour_of(record.timestamp_ms)
            for rollout_id in members:
                if hash(rollout_id) in rollouts:
                    rollouts.discard(hash(rollout_id))  # each is told once, at the first event that names it
                    told = f"{rollout_id} of no rollout"
                    found.append(_difference("extra", topic, hour, place, rollout_id, told))
            if hash(group_id) in tally.unstarted:
                found.append(
                    _difference(
                        "extra", topic, hour, place, group_id, f"{group_id} was closed and never started"
                    )
                )
    return found


def _names(event: Event) -> tuple[str, tuple[str, ...]]:
    """The group and the rollouts that an event names."""
    match event:
        case Group():
            return event.group_id, tuple(member.rollout.rollout_id for member in event.members)
        case GroupFate():
            return event.group_id, event.members
        case _:
            return "", ()
