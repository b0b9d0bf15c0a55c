"""`rollwire ledger`: every topic's account, from the topics and the committed offsets alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.table import Table

from rollwire.consumers.ledger import Ledger, count_ledger
from rollwire.ops.broker import DEFAULT_DIR, Bootstrap, Folder, Prefix, Registry, broker
from rollwire.ops.printing import console, table, write_json


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
    write_json(json, counted)
    console().print(draw(counted))
    return 0 if counted.gap == 0 else 1


def draw(counted: Ledger) -> Table:
    """One row a topic; ids of what is missing or too many stand in its last column."""
    counts = ("received", "accepted", "refused", "shed", "pending", "gap")
    drawn = table("topic", *counts, "missing or too many", right=counts)
    for line in counted.lines:
        ids = ", ".join((*line.missing_ids, *line.extra_ids))
        numbers = (line.received, line.accepted, line.refused, line.shed, line.pending, line.gap)
        drawn.add_row(line.topic, *(f"{number:,}" for number in numbers), ids)
    return drawn
