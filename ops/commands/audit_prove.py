"""`rollwire audit prove`: proves that one record was sealed, and checks such a proof."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter

from rollwire.ops.auditing import JsonFile, auditing, conclude
from rollwire.ops.broker import DEFAULT_DIR, Bootstrap, Folder, Prefix
from rollwire.ops.commands.audit_progress import counting
from rollwire.ops.commands.weights_access import Bucket
from rollwire.ops.history import History, open_history
from rollwire.ops.signing import open_trusted
from rollwire.schemas.catalogue import TOPICS, topic_named
from rollwire.schemas.errors import AuditError, ConfigError, KeyUnknown, SignatureInvalid
from rollwire.schemas.records import Position
from rollwire.streams.archive.proofs import Proven, check_proof, write_proof
from rollwire.streams.archive.prove import prove as make_proof
from rollwire.streams.archive.sealed import Trusted
from rollwire.streams.findings import Finding, Kind, Report, at
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log import TopicPartition
from rollwire.streams.seams.places import existing
from rollwire.streams.seams.scan import scan

_POSITION: Final = re.compile(r"([a-z0-9-]+):(\d+):(\d+)")
_ID: Final = "ce_id"


def prove(
    *,
    event: str | None = None,
    topic: tuple[str, ...] = (),
    check: Path | None = None,
    out: Annotated[Path | None, Parameter(alias="-o")] = None,
    record: Annotated[bool, Parameter(negative="--no-record")] = True,
    public_key: tuple[Path, ...] = (),
    json: JsonFile = None,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    bucket: Bucket = None,
) -> int:
    """Prove that an event stands in the sealed history as it was sealed; or check such a proof, with the public key alone.

    A proof is one JSON file: the record, the digests of its segment, the way from there to the root of its epoch, and the signed
    head. To check it takes neither broker nor store.

    Parameters
    ----------
    event
        The event's id, or its position as topic:partition:offset.
    topic
        Look for the id in these topics only.
    check
        Check the proof in this file.
    out
        Write the proof there; by default to standard output.
    record
        Put the record itself into the proof; without it, its digest stands for it.
    public_key
        Public keys (PEM) to trust; by default the stack's own, signing.pub.
    """
    with auditing():
        if (event is None) == (check is None):
            raise ConfigError("say either --event, to make a proof, or --check, to check one")
        trusted = open_trusted(dir, public_key)
        if check is not None:
            return conclude(_checked(check, trusted), json)
        with open_history("audit-prove", dir=dir, bootstrap=bootstrap, prefix=prefix, bucket=bucket) as past:
            return _made(past, event or "", topic, out, record, trusted, json)


def _checked(file: Path, trusted: Trusted) -> Report:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    try:
        proven = check_proof(data, trusted)
    except AuditError as error:
        kind = (
            Kind.SIGNATURE_INVALID
            if isinstance(error, SignatureInvalid)
            else Kind.KEY_UNKNOWN
            if isinstance(error, KeyUnknown)
            else Kind.PROOF_INVALID
        )
        return Report(
            command="prove",
            findings=(Finding(kind=kind, where=str(file), detail=str(error)),),
            checked={"proofs": 1},
        )
    return Report(command="prove", findings=(), checked={"proofs": 1}, notes=tuple(_said(proven)))


def _said(proven: Proven) -> list[str]:
    head, (topic, partition) = proven.head, proven.at
    sealed = datetime.fromtimestamp(head.sealed_us / 1e6, UTC).isoformat(timespec="seconds")
    place = f"{at(topic, partition, proven.offset)} of {head.name!r}"
    leaf = proven.leaf.hex()
    said = [f"{place} was sealed in epoch {head.epoch:,} at {sealed} by {head.key_id}; leaf {leaf}"]
    if (record := proven.record) is not None:
        ids = [value.decode(errors="replace") for name, value in record.headers if name == _ID and value]
        size = "null" if record.value is None else f"{len(record.value):,} bytes"
        said.append(
            f"event {', '.join(ids) or 'without an id'}: timestamp {record.timestamp_ms} ms, value {size}"
        )
    return said


def _made(
    past: History,
    event: str,
    topics: tuple[str, ...],
    out: Path | None,
    with_record: bool,
    trusted: Trusted,
    json: Path | None,
) -> int:
    with counting("looking for the event") as progress:
        position = _position(past, event, topics, progress)
    if position is None:
        what = "it is in none of the topics" if not topics else f"it is not in {', '.join(topics)}"
        return conclude(_report(Finding(kind=Kind.EVENT_UNKNOWN, where=event, detail=what)), json)
    place = TopicPartition(position.topic, position.partition)
    try:
        proof = make_proof(
            past.log,
            past.store,
            name=past.name,
            at=place,
            offset=position.offset,
            trusted=trusted,
            with_record=with_record,
            clock=SystemClock(),
        )
    except AuditError as error:
        finding = Finding(
            kind=Kind.PROOF_INVALID,
            where=at(*place, position.offset),
            detail=str(error),
            position=position,
        )
        return conclude(_report(finding), json)
    data = write_proof(proof)
    if out is None:
        sys.stdout.write(data.decode())
        return 0
    out.write_bytes(data)
    said = _said(check_proof(data, trusted))
    return conclude(_report(notes=(*said, f"the proof is in {out}")), json)


def _report(*findings: Finding, notes: tuple[str, ...] = ()) -> Report:
    return Report(command="prove", findings=findings, checked={"events": 1}, notes=notes)


def _position(
    past: History, event: str, topics: tuple[str, ...], progress: Callable[[int], None]
) -> Position | None:
    """Where the event stands; the first place, where it was written more than once."""
    if (named := _POSITION.fullmatch(event)) is not None:
        return Position(topic=topic_named(named[1]).name, partition=int(named[2]), offset=int(named[3]))
    wanted = event.encode()
    chosen = sorted(topic_named(one).name for one in topics) or sorted(TOPICS)
    for count, record in enumerate(scan(past.log, existing(past.log, chosen), lost=lambda _: None), 1):
        if any(name == _ID and value == wanted for name, value in record.headers):
            return Position(topic=record.topic, partition=record.partition, offset=record.offset)
        if count % 1_000 == 0:
            progress(1_000)
    return None
