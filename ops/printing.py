"""How commands tell something: answers on standard output, how far they are on standard error, JSON in a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.progress import Progress, ProgressColumn
from rich.table import Table

from rollwire.schemas.errors import ConfigError

_WIDE: Final = 200


def console(*, markup: bool = True) -> Console:
    """Standard output. Into a pipe a line is not folded: it goes on to grep or awk."""
    return Console(highlight=False, markup=markup, width=None if sys.stdout.isatty() else _WIDE)


def table(*columns: str, right: Container[str] = ()) -> Table:
    """Without lines around it. `right`: the columns of numbers."""
    made = Table(box=None, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left")
    return made


def bars(*columns: ProgressColumn) -> Progress:
    """On a terminal, on standard error, and gone at the end; else nothing is shown, since nobody looks."""
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


def write_json(
    path: Path | None, value: object, *, enc_hook: Callable[[object], object] | None = None
) -> None:
    """Where somebody asked for it. `enc_hook`: how msgspec writes what it does not know. Raises `ConfigError` where it cannot
    be written."""
    if path is None:
        return
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(value, enc_hook=enc_hook), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}") from error
