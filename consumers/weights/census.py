"""Takes stock for retention: what the log says and what the store holds. Reads only."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import msgspec

from rollwire.consumers.trainer.checkpoint_store import Checkpoint
from rollwire.consumers.weights.manifest import Manifest, decode_manifest
from rollwire.consumers.weights.paths import anchor_claim
from rollwire.consumers.weights.retention import FOR_EVER, Census, Held, folder_of
from rollwire.schemas.errors import ObjectMissing, Refused, WeightError
from rollwire.schemas.records import (
    Evaluation,
    Event,
    FleetStatus,
    RoutingTrace,
    WeightLink,
    WeightVersion,
)
from rollwire.streams.emit import decode_record, deletes
from rollwire.streams.seams.log import Log, Record, TopicPartition
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store import ObjectInfo, ObjectStore

FOLDERS = ("weights/", "checkpoints/", "routing/")
"""What is looked after. Whatever else lies in the bucket is somebody else's."""


TOPICS = ("weight-versions", "weight-links", "fleet-status", "evaluations")
"""What names versions, or says that one is needed."""


class Books(NamedTuple):
    """What the log says of weights."""

    events: list[WeightVersion]
    links: list[WeightLink]
    held: Held
    traces: frozenset[str]
    traces_from_us: int


def read_books(
    log: Log, pinned: Collection[int] = (), *, topics: Sequence[str] = TOPICS, traces: bool = False
) -> Books:
    """Reads the topics from their beginnings. `traces`: whether routing traces are asked for, which are many.

    Raises what the log raises. An event that is refused names nothing.
    """
    events: list[WeightVersion] = []
    links: list[WeightLink] = []
    served: dict[str, str] = {}
    channels: dict[str, tuple[str, int]] = {}
    for event in _events(scan(log, topics)):
        match event:
            case WeightVersion():
                events.append(event)
            case WeightLink():
                links.append(event)
            case FleetStatus():
                served[f"{event.fleet}/{event.replica}"] = (
                    "" if event.state == "stopped" else event.state_digest
                )
            case Evaluation(promotion=promotion) if promotion is not None:
                channels[promotion.channel] = (event.lineage, event.version)
            case _:
                pass
    claims, begin_us = _traces(log) if traces else (frozenset[str](), FOR_EVER)
    held = Held(
        frozenset(served.values()) - {""},
        {where: name for name, where in channels.items()},
        frozenset(pinned),
    )
    return Books(events, links, held, claims, begin_us)


def take_census(
    store: ObjectStore, books: Books, *, sole: bool = False, folders: Iterable[str] = FOLDERS
) -> Census:
    """Lists the store and reads the manifests that matter. Raises what the store raises.

    `sole`: no other log names objects of this bucket, so that lineages which this one does not know never were.
    """
    objects = [info for folder in folders for info in store.list(folder)]
    inside: dict[str, frozenset[str]] = {}
    named: set[str] = set()
    for event in books.events:
        named.add(event.manifest.key)
        anchor = anchor_claim(event)
        wanted = [] if anchor is None else [anchor]
        if event.base_version is not None and not event.objects and event.kind != "empty":
            wanted.append(event.manifest)
        for claim in wanted:
            named.add(claim.key)
            manifest = _manifest(store, claim.key)
            if manifest is not None:
                sums = set() if manifest.sums is None else {manifest.sums.key}
                inside[claim.key] = frozenset({entry.key for entry in manifest.objects} | sums)
        if event.checkpoint is not None:
            inside[event.checkpoint.key] = _vectors(store, event.checkpoint.key)
    lineages = {event.lineage for event in books.events}
    models = {folder_of(event.manifest.key) for event in books.events}
    return Census(
        books.events,
        books.links,
        books.held,
        objects,
        inside,
        books.traces,
        books.traces_from_us,
        frozenset() if sole else frozenset(_foreign(store, objects, named, lineages, models)),
    )


def _foreign(
    store: ObjectStore,
    objects: Collection[ObjectInfo],
    named: Collection[str],
    lineages: Collection[str],
    models: Collection[str],
) -> set[str]:
    """Folders in which another log may have objects."""
    found: set[str] = set()
    for info in objects:
        folder = folder_of(info.key)
        kind, _, name = folder.partition("/")
        if kind == "checkpoints":
            foreign = name not in lineages
        elif kind == "routing":
            foreign = f"weights/{name}" not in models
        elif folder not in models:
            foreign = True
        elif "/manifests/" in info.key and info.key not in named:
            manifest = _manifest(store, info.key)
            foreign = manifest is None or manifest.lineage not in lineages
        else:
            foreign = False
        if foreign:
            found.add(folder)
    return found


def _manifest(store: ObjectStore, key: str) -> Manifest | None:
    try:
        return decode_manifest(store.get(key))
    except (ObjectMissing, WeightError):
        return None


def _vectors(store: ObjectStore, key: str) -> frozenset[str]:
    try:
        checkpoint = msgspec.json.decode(store.get(key), type=Checkpoint)
    except (ObjectMissing, msgspec.MsgspecError):
        return frozenset()
    return frozenset(claim.key for claim in checkpoint.vectors.values())


def _traces(log: Log) -> tuple[frozenset[str], int]:
    """The keys that traces in the log claim, and since when the log has all of them."""
    partitions = [TopicPartition("routing-traces", p) for p in range(log.partitions("routing-traces"))]
    begins = log.beginning_offsets(partitions)
    since = {p: FOR_EVER for p in partitions if begins[p] == 0}
    claims: set[str] = set()
    for record in scan(log, ["routing-traces"]):
        since.setdefault(TopicPartition(record.topic, record.partition), record.timestamp_ms * 1_000)
        event = _decoded(record)
        if isinstance(event, RoutingTrace) and event.claim is not None:
            claims.add(event.claim.key)
    ended = (1 << 62) if len(since) < len(partitions) else FOR_EVER  # a partition of which nothing is left
    return frozenset(claims), max([*since.values(), ended], default=FOR_EVER)


def _events(records: Iterable[Record]) -> Iterable[Event]:
    for record in records:
        event = _decoded(record)
        if event is not None:
            yield event


def _decoded(record: Record) -> Event | None:
    if deletes(record):
        return None
    try:
        return decode_record(record)
    except Refused:  # whoever consumes transactionally has it in dead-letters
        return None
