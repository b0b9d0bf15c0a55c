"""`rollwire weights link`: makes the skip links that are missing."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter, validators
from rich.console import Console

from rollwire.consumers.weights.link_chain import compose_link, missing_skips
from rollwire.ops.broker import DEFAULT_DIR, Bootstrap, Folder, Prefix, Registry, broker
from rollwire.ops.commands.weights_access import Bucket, Lineage, of_lineage
from rollwire.ops.stores import bucket_store
from rollwire.schemas.errors import ObjectMissing, WeightError
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.clock import SystemClock


def link(
    *,
    last: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 256,
    lineage: Lineage = None,
    bucket: Bucket = None,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    schema_registry: Registry = None,
) -> None:
    """Make the skip links that are missing, out of the deltas in the store.

    A publisher makes them beside its trainer, unless it falls behind. This needs no trainer and no weights; it may run
    beside one, and twice.

    Parameters
    ----------
    last
        Newest versions at which links may end.
    """
    out, clock, store = Console(highlight=False), SystemClock(), bucket_store(dir, bucket)
    with broker(dir, bootstrap, prefix, schema_registry).log("weights") as log:
        events, links = of_lineage(log, lineage)
        writer = log.writer()
        made, size = 0, 0
        try:
            for base, version in missing_skips(events, links, last):
                try:
                    event = compose_link(store, events, links, base, version, published_us=clock.now_us())
                except (WeightError, ObjectMissing) as error:
                    out.print(f"no link from {base} to {version}: {error}", soft_wrap=True)
                    continue
                writer.write([outgoing(event, source="rollwire/weights/link", time_us=event.published_us)])
                links.append(event)
                made, size = made + 1, size + event.stored_bytes
        finally:
            writer.close()
    out.print(f"{made} links made, {size:,} bytes")
