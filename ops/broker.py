"""Which broker and which topics a command means: said on the command line, else those of the local stack."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

from cyclopts import Parameter

from rollwire.ops.registry import set_registry
from rollwire.ops.stack import read_stack
from rollwire.streams.seams.log_kafka import KafkaLog

DEFAULT_DIR: Final = Path(".rollwire")
DEFAULT_PREFIX: Final = "rollwire."

Folder = Annotated[Path, Parameter(name="--dir", help="Folder of the local stack's state.")]
Bootstrap = Annotated[
    str | None, Parameter(name="--bootstrap", help="host:port of a broker; by default the local stack's.")
]
Prefix = Annotated[
    str | None,
    Parameter(
        name="--prefix",
        help="Prefix of the topics; by default the newest run's, and 'rollwire.' without a run.",
    ),
]


Registry = Annotated[
    str | None,
    Parameter(
        name="--schema-registry",
        help="URL of the schema registry that values in Confluent's wire format are read by; by default the run's.",
    ),
]


class Broker(NamedTuple):
    bootstrap: str
    prefix: str
    registry: str | None = None  # URL of the schema registry that is meant

    @property
    def name(self) -> str:
        """Of the run whose topics these are: their prefix without its last dot."""
        return self.prefix.rstrip(".")

    def log(self, command: str) -> closing[KafkaLog]:
        """For a `with`, at whose end the log is closed. The broker knows its client as `rollwire-<command>`."""
        return closing(KafkaLog(self.bootstrap, self.prefix, client_id=f"rollwire-{command}", connect=True))


def broker(
    folder: Path,
    bootstrap: str | None = None,
    prefix: str | None = None,
    registry: str | None = None,
) -> Broker:
    """The broker that is meant; the schema registry that is meant is the process's from now on.

    Raises `StackError` where no broker is named and no local stack is recorded.
    """
    if bootstrap is None:
        bootstrap = read_stack(folder).bootstrap
    run = _newest_run(folder, prefix)
    url: str | None = registry or run.get("schema_registry_url")
    at = Broker(bootstrap, str(run.get("prefix", DEFAULT_PREFIX)) if prefix is None else prefix, url)
    set_registry(url, at.prefix)
    return at


def run_bucket(folder: Path, prefix: str) -> str | None:
    """Where the newest run with these topics keeps weights and archive; None: in the stack's own bucket, or no such run."""
    found = _newest_run(folder, prefix).get("bucket")
    return None if found is None else str(found)


def _newest_run(folder: Path, prefix: str | None) -> dict[str, Any]:
    """The settings of the newest run (with that prefix) under `folder`, as its file has them; empty without one."""
    for file in sorted((folder / "runs").glob("[0-9]*/run.json"), reverse=True):
        found: dict[str, Any] = json.loads(file.read_text("utf-8"))
        if prefix is None or found.get("prefix") == prefix:
            return found
    return {}
