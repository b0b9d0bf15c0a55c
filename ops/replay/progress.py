"""How far a replay has come: how many records, and where in the history it stands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from rollwire.ops.printing import bars
from rollwire.streams.replay.tally import Told, moment

_EVERY: Final = 100


@contextmanager
def progress() -> Iterator[Told]:
    """On a terminal a line of standard error, which goes at the end; else nothing."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with bars(*columns) as shown:
        line = shown.add_task("replay")
        count = 0

        def told(what: str, at_us: int) -> None:
            nonlocal count
            count += 1
            if count % _EVERY == 0:
                shown.update(line, description=f"{what}: {count:,} records, {moment(at_us)}")

        yield told
