"""`rollwire ledger`: every topic's account, from the topics and the committed offsets alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from rollwire.consumers.ledger import Ledger, count_ledger
from rollwire.ops.broker import DEFAULT_DIR, Bootstrap, Folder, Prefix, Registry, broker


def ledger(
    *,
    json: Annotated[Path | None, Parameter(help="Write the account there as JSON.")] = None,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    schema_registry: Registry = None,
) -> int:
    """Add up every topic: received = accepted + refused + shed + pending. Exit code 1 where anything is missing.

    It reads the topics from their beginning, and believes nobody else.
    """
    at = broker(dir, bootstrap, prefix, schema_registry)
    with at.log("ledger") as log:
        counted = count_ledger(log, at.prefix)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(counted), indent=2))
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(draw(counted))
    return 0 if counted.gap == 0 else 1


def draw(counted: Ledger) -> Table:
    """One row a topic; ids of what is missing or too many stand in its last column."""
    table = Table(box=None, pad_edge=False)
    for column in (
        "topic",
        "received",
        "accepted",
        "refused",
        "shed",
        "pending",
        "gap",
        "missing or too many",
    ):
        table.add_column(column, justify="left" if column in ("topic", "missing or too many") else "right")
    for line in counted.lines:
        ids = ", ".join((*line.missing_ids, *line.extra_ids))
        numbers = (line.received, line.accepted, line.refused, line.shed, line.pending, line.gap)
        table.add_row(line.topic, *(f"{number:,}" for number in numbers), ids)
    return table
