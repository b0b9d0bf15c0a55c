"""How far an audit is that cannot know how much there is: on a terminal, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def counting(what: str) -> Iterator[Callable[[int], None]]:
    """A function that is told how many records were read since it was told last."""
    if not sys.stderr.isatty():
        yield lambda _records: None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}: {task.completed:,} records"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(what, total=None)
        yield lambda records: shown.advance(task, records)
