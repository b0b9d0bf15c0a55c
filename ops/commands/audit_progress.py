"""How far an audit is that cannot know how much there is: on a terminal, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from rollwire.ops.printing import bars


@contextmanager
def counting(what: str) -> Iterator[Callable[[int], None]]:
    """A function that is told how many records were read since it was told last."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}: {task.completed:,} records"),
        TimeElapsedColumn(),
    )
    with bars(*columns) as shown:
        task = shown.add_task(what, total=None)
        yield lambda records: shown.advance(task, records)
