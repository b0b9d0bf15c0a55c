"""`rollwire weights ls | show | verify | export | link | gc | revert`: the published versions, from the log and the store alone."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from rollwire.consumers.weights.export import export_version
from rollwire.consumers.weights.paths import Ways, known_versions
from rollwire.consumers.weights.verify import verify_ways
from rollwire.ops.broker import DEFAULT_DIR, Bootstrap, Folder, Prefix, Registry
from rollwire.ops.commands.weights_access import (
    Bucket,
    Lineage,
    chosen,
    of_lineage,
)
from rollwire.ops.commands.weights_gc import gc
from rollwire.ops.commands.weights_link import link
from rollwire.ops.commands.weights_revert import revert
from rollwire.ops.history import open_reading
from rollwire.ops.printing import console
from rollwire.ops.stores import bucket_store
from rollwire.schemas.errors import WeightError
from rollwire.schemas.records import WeightVersion
from rollwire.streams.seams.log import Log

app = App(
    name="weights",
    help="List, show, verify, export and collect weight versions; go back to an older one.",
    result_action="return_value",
)
app.command(revert)
app.command(gc)
app.command(link)


@app.command
def ls(
    *,
    lineage: Lineage = None,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    schema_registry: Registry = None,
) -> None:
    """List the versions of a lineage: kind, base, the ways that end in it, size, digest."""
    with _log(dir, bootstrap, prefix, schema_registry) as log:
        events, links = of_lineage(log, lineage)
    ways: Counter[int] = Counter()
    for step in Ways(known_versions(events), links):
        ways[step.event.version] += step.kind != "same"
    table = Table(box=None, pad_edge=False, title=f"lineage {events[0].lineage}", title_justify="left")
    for column in (
        "version",
        "kind",
        "base",
        "coder",
        "ways",
        "stored",
        "of full",
        "changed",
        "digest",
        "published",
    ):
        left = column in ("kind", "coder", "digest", "published")
        table.add_column(column, justify="left" if left else "right")
    for event in sorted(events, key=lambda e: e.version):
        table.add_row(
            str(event.version),
            _kind(event),
            "" if event.base_version is None else str(event.base_version),
            event.coder,
            str(ways[event.version]),
            f"{event.stored_bytes:,}",
            _percent(event.stored_bytes, event.full_bytes),
            _percent(event.changed_elements, event.total_elements),
            event.state_digest[:16],
            datetime.fromtimestamp(event.published_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%SZ"),
        )
    console().print(table)


@app.command
def show(
    version: int | None = None,
    /,
    *,
    anchor: Annotated[bool, Parameter(negative=())] = False,
    links: Annotated[bool, Parameter(negative=())] = False,
    bucket: Bucket = None,
    lineage: Lineage = None,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    schema_registry: Registry = None,
) -> None:
    """Print the manifest of a version as JSON.

    Parameters
    ----------
    version
        By default the newest.
    anchor
        The manifest of the version's full snapshot, instead of the delta's.
    links
        The links that begin or end at the version, one a line, instead of the manifest.
    """
    with _log(dir, bootstrap, prefix, schema_registry) as log:
        events, known_links = of_lineage(log, lineage)
    event = chosen(events, version)
    if links:
        touching = [one for one in known_links if event.version in (one.version, one.base_version)]
        for link in touching:
            sys.stdout.write(msgspec.json.encode(link).decode() + "\n")
        if not touching:
            sys.stderr.write(f"no link begins or ends at version {event.version} of {event.lineage}\n")
        return
    claim = event.anchor if anchor else event.manifest
    if claim is None:
        raise WeightError(
            f"version {event.version} has no full snapshot: `rollwire weights ls` names those that have, "
            "`rollwire weights export` writes one of any version"
        )
    data = bucket_store(dir, bucket).get(claim.key, sha256=claim.sha256)
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
    schema_registry: Registry = None,
) -> int:
    """Rebuild a version from the store by every way that leads to it; check all objects and digests.

    Exit code 1: a way is broken. Followers take another one, if there is one.

    Parameters
    ----------
    version
        By default the newest.
    """
    with _log(dir, bootstrap, prefix, schema_registry) as log:
        events, links = of_lineage(log, lineage)
    event = chosen(events, version)
    out = Console(highlight=False)
    broken = 0
    for way in verify_ways(bucket_store(dir, bucket), events, links, event.version):
        shown = ", ".join(way.steps if len(way.steps) < 8 else (*way.steps[:2], "...", *way.steps[-2:]))
        verdict = "right" if way.error is None else f"WRONG: {type(way.error).__name__}: {way.error}"
        broken += way.error is not None
        out.print(
            f"version {event.version} by {way.kind}: {verdict}, {way.bytes:,} bytes read ({shown})",
            soft_wrap=True,
        )
    out.print(f"digest {event.state_digest}")
    return 1 if broken else 0


@app.command
def export(
    folder: Path,
    version: int | None = None,
    /,
    *,
    bucket: Bucket = None,
    lineage: Lineage = None,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    schema_registry: Registry = None,
) -> None:
    """Write a verified version into a new folder that transformers and inference engines open as it is.

    Parameters
    ----------
    folder
        Must be empty, or not be there.
    version
        By default the newest.
    """
    with _log(dir, bootstrap, prefix, schema_registry) as log:
        events, links = of_lineage(log, lineage)
    event = chosen(events, version)
    files = export_version(bucket_store(dir, bucket), events, links, event.version, folder)
    Console(highlight=False).print(
        f"version {event.version} ({event.state_digest[:16]}) in {folder}: {', '.join(files)}"
    )


def _log(
    dir: Path, bootstrap: str | None, prefix: str | None, schema_registry: str | None
) -> AbstractContextManager[Log]:
    return open_reading(
        "weights", dir=dir, bootstrap=bootstrap, prefix=prefix, schema_registry=schema_registry
    )


def _kind(event: WeightVersion) -> str:
    back = "" if event.reverts_to is None else f" to {event.reverts_to}"
    return event.kind + back + ("+anchor" if event.anchor is not None and event.kind != "anchor" else "")


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f}%" if whole else ""
