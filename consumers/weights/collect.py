"""Deletes what `retention` proved may go: first word in the log, then, object by object, another look, then the delete."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import structlog

from rollwire.consumers.weights.census import Books, read_books
from rollwire.consumers.weights.links import gone_link
from rollwire.consumers.weights.retention import Retention, RetentionConfig
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.store import ObjectStore

_log = structlog.get_logger()


class Collected(NamedTuple):
    objects: int
    bytes: int
    spared: int  # put again or named since the plan was made


def collect(
    log: Log, store: ObjectStore, books: Books, plan: Retention, config: RetentionConfig, clock: Clock
) -> Collected:
    """Carries out a plan that was made from `books`.

    A crash in between is harmless: what the log says is gone is not planned over, and the next run deletes the rest.
    Raises what the log and the store raise.
    """
    now_us = clock.now_us()
    if plan.gone:
        writer = log.writer()
        try:
            links = [gone_link(gone.event, gone.base_version, now_us) for gone in plan.gone]
            writer.write([outgoing(link, source="rollwire/weights/gc", time_us=now_us) for link in links])
        finally:
            writer.close()
    renamed = _named_since(log, books)
    done, size, spared = 0, 0, 0
    for verdict in plan.deletions:
        key = verdict.info.key
        info = store.head(key)
        if info is None:
            continue
        if key in renamed or clock.now_us() - info.modified_us < config.grace_us:
            spared += 1
            _log.info("weights.spared", key=key)
            continue
        store.delete(key)
        done, size = done + 1, size + info.size
    return Collected(done, size, spared)


def _named_since(log: Log, books: Books) -> Collection[str]:
    """Keys that events name which came after the books were read."""
    now = read_books(log, topics=("weight-versions", "weight-links"))
    keys: set[str] = set()
    for event in now.events[len(books.events) :]:
        claims = [event.manifest, event.anchor, event.checkpoint]
        keys.update(claim.key for claim in claims if claim is not None)
        keys.update(shard.key for shard in event.objects)
    for link in now.links[len(books.links) :]:
        keys.update(shard.key for shard in link.objects)
    return keys
