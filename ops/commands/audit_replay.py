"""`rollwire audit replay`: every processor decides its history again by the recorded cuts, and must say the same."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from rollwire.ops.auditing import JsonFile, auditing, conclude
from rollwire.ops.broker import DEFAULT_DIR, Bootstrap, Folder, Prefix, Registry
from rollwire.ops.history import open_history
from rollwire.ops.replay.progress import progress
from rollwire.streams.replay.audit import audit_replay
from rollwire.streams.replay.settings import read_spoken


def replay(
    *processors: Annotated[
        str, Parameter(help="assemble, assemble-production, pack, attribute; by default all.")
    ],
    json: JsonFile = None,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    schema_registry: Registry = None,
) -> int:
    """Decide the whole history again by the cuts that every event records, and compare with what was said then.

    Settings are those that each processor said in the log when it started. Exit codes: 0 clean, 1 findings, 2 could not run.
    """
    with (
        auditing(),
        open_history(
            "audit-replay", dir=dir, bootstrap=bootstrap, prefix=prefix, schema_registry=schema_registry
        ) as past,
    ):
        with progress() as told:
            report = audit_replay(past.log, processors, read_spoken(past.log), told)
        return conclude(report, json)
