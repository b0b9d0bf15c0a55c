"""The erasure of one person, in an order in which no half-way state says what is not so.

1. every data key of theirs is destroyed (`streams.seams.keys_store` says how)
2. the `erasures` event is written
3. the cache is purged of what names them

The key first: an event that came first would tell readers and auditors that something is erased which may still be opened,
and for ever so if the process died in between; and whoever forgot the key on it would fetch it again. Died after 1, nothing
opens any more, and nobody was told yet: caches keep a copy until their time is over. Every step may be repeated: the same
call again finishes the rest, and writes no second event where the log has one that covers all destroyed keys.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from rollwire.schemas.records import Erasure
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.cache import Cache
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.erasures import TOPIC, erasure_of
from rollwire.streams.seams.keys import KeyStore
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.scan import scan

SOURCE: Final = "rollwire/erase"


class Request(NamedTuple):
    subject: str  # pseudonym
    request_id: str
    reason: str
    by: str


class Done(NamedTuple):
    event: Erasure  # as the log has it
    repeated: bool  # an earlier call had written it
    purged: int | None  # entries of the cache; None = it did not answer, and the call is to be repeated


def erase(log: Log, keys: KeyStore, cache: Cache, request: Request, clock: Clock) -> Done:
    """Destroys, records, purges. Raises `TopicMismatch` before anything is done where there is no topic `erasures`;
    `StoreUnavailable`, `LogUnavailable` where a step failed: call again."""
    log.partitions(TOPIC)
    generations = keys.destroy(request.subject)
    event = recorded(log, request.subject, generations)
    repeated = event is not None
    if event is None:
        event = Erasure(
            subject=request.subject,
            request_id=request.request_id,
            generations=generations,
            reason=request.reason,
            by=request.by,
            erased_us=clock.now_us(),
        )
        writer = log.writer()
        try:
            writer.write([outgoing(event, source=SOURCE, time_us=event.erased_us)])
        finally:
            writer.close()
    return Done(event, repeated, cache.purge(request.subject))


def recorded(log: Log, subject: str, generations: int) -> Erasure | None:
    """The first event that says that keys 1 to `generations` of this person are destroyed."""
    for record in scan(log, (TOPIC,)):
        event = erasure_of(record) if record.key == subject.encode() else None
        if event is not None and event.generations >= generations:
            return event
    return None
