"""`rollwire weights ls | show | verify`: the published versions, from the log and the store alone."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from rollwire.consumers.weights.verify import verify_version
from rollwire.consumers.weights.versions import Versions
from rollwire.ops.broker import DEFAULT_DIR, Bootstrap, Folder, Prefix, broker
from rollwire.ops.commands.weights_revert import revert
from rollwire.ops.stack import read_stack
from rollwire.schemas.errors import WeightError
from rollwire.schemas.records import WeightVersion
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store_s3 import S3Store

app = App(name="weights", help="List, show and verify weight versions.")
app.command(revert)

Lineage = Annotated[
    str | None, Parameter(name="--lineage", help="Training run; by default the one started last.")
]
Bucket = Annotated[
    str | None, Parameter(name="--bucket", help="Bucket in the local stack's store; by default its own.")
]


@app.command
def ls(
    *, lineage: Lineage = None, dir: Folder = DEFAULT_DIR, bootstrap: Bootstrap = None, prefix: Prefix = None
) -> None:
    """List the versions of a lineage: kind, base, size, digest."""
    versions = _versions(dir, bootstrap, prefix, lineage)
    table = Table(box=None, pad_edge=False, title=f"lineage {versions.lineage}", title_justify="left")
    for column in ("version", "kind", "base", "step", "stored", "of full", "changed", "digest", "published"):
        table.add_column(column, justify="left" if column in ("kind", "digest", "published") else "right")
    for event in sorted(versions.events, key=lambda e: e.version):
        table.add_row(
            str(event.version),
            event.kind + ("+anchor" if event.anchor is not None and event.kind != "anchor" else ""),
            "" if event.base_version is None else str(event.base_version),
            str(event.step),
            str(event.stored_bytes),
            _percent(event.stored_bytes, event.full_bytes),
            _percent(event.changed_elements, event.total_elements),
            event.state_digest[:16],
            datetime.fromtimestamp(event.published_us / 1e6, UTC).isoformat(timespec="seconds"),
        )
    # Into a pipe a table is never folded: it goes on to grep or awk.
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table)


@app.command
def show(
    version: int | None = None,
    /,
    *,
    anchor: Annotated[bool, Parameter(negative=())] = False,
    bucket: Bucket = None,
    lineage: Lineage = None,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
) -> None:
    """Print the manifest of a version as JSON.

    Parameters
    ----------
    version
        By default the newest.
    anchor
        The manifest of the version's full snapshot, instead of the delta's.
    """
    event = _chosen(_versions(dir, bootstrap, prefix, lineage), version)
    claim = event.anchor if anchor else event.manifest
    if claim is None:
        raise WeightError(f"version {event.version} has no full snapshot")
    data = _store(dir, bucket).get(claim.key, sha256=claim.sha256)
    sys.stdout.write(msgspec.json.format(data, indent=2).decode() + "\n")


@app.command
def verify(
    version: int | None = None,
    /,
    *,
    bucket: Bucket = None,
    lineage: Lineage = None,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
) -> None:
    """Rebuild a version from the store by every way that leads to it; check all objects and digests.

    Parameters
    ----------
    version
        By default the newest.
    """
    versions = _versions(dir, bootstrap, prefix, lineage)
    event = _chosen(versions, version)
    out = Console(highlight=False)
    for way in verify_version(_store(dir, bucket), versions.events, (), event.version):
        shown = " > ".join(way.steps if len(way.steps) < 8 else (*way.steps[:2], "...", *way.steps[-2:]))
        out.print(f"version {event.version} by {way.kind}: right, {way.bytes:,} bytes read ({shown})")
    out.print(f"digest {event.state_digest}")


def _versions(folder: Path, bootstrap: str | None, prefix: str | None, lineage: str | None) -> Versions:
    at = broker(folder, bootstrap, prefix)
    log = KafkaLog(at.bootstrap, at.prefix, client_id="rollwire-weights")
    versions = Versions(lineage)
    try:
        for record in scan(log, ["weight-versions"]):
            event = decode_record(record)
            if isinstance(event, WeightVersion):
                versions.add(event)
    finally:
        log.close()
    if versions.newest is None:
        raise WeightError(f"no version under {at.prefix}weight-versions{f' of {lineage}' if lineage else ''}")
    return versions


def _chosen(versions: Versions, version: int | None) -> WeightVersion:
    for event in versions.events:
        if event.version == (version if version is not None else max(e.version for e in versions.events)):
            return event
    raise WeightError(f"version {version} is not known in lineage {versions.lineage}")


def _store(folder: Path, bucket: str | None) -> S3Store:
    stack = read_stack(folder)
    return S3Store(
        stack.s3_endpoint, bucket or stack.bucket, stack.access_key, stack.secret_key, stack.region
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f}%" if whole else ""
