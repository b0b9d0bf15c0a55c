"""Which broker and which topics a command means: said on the command line, else those of the local stack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final, NamedTuple

from cyclopts import Parameter

from rollwire.ops.stack import read_stack

DEFAULT_DIR: Final = Path(".rollwire")
DEFAULT_PREFIX: Final = "rollwire."

Folder = Annotated[Path, Parameter(name="--dir", help="Folder of the local stack's state.")]
Bootstrap = Annotated[
    str | None, Parameter(name="--bootstrap", help="host:port of a broker; by default the local stack's.")
]
Prefix = Annotated[
    str | None,
    Parameter(
        name="--prefix", help="Prefix of the topics; by default the newest run's, without one rollwire."
    ),
]


class Broker(NamedTuple):
    bootstrap: str
    prefix: str


def broker(folder: Path, bootstrap: str | None = None, prefix: str | None = None) -> Broker:
    """The broker that is meant. Raises `StackError` where none is named and no local stack is recorded."""
    if bootstrap is None:
        bootstrap = read_stack(folder).bootstrap
    return Broker(bootstrap, newest_prefix(folder) if prefix is None else prefix)


def newest_prefix(folder: Path) -> str:
    """The topic prefix of the newest run under `folder`; without a run, the default one."""
    files = sorted((folder / "runs").glob("[0-9]*/run.json"))
    if not files:
        return DEFAULT_PREFIX
    return str(json.loads(files[-1].read_text("utf-8")).get("prefix", DEFAULT_PREFIX))
