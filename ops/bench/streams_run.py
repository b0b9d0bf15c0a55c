"""Runs `rollwire bench streams`: a broker, a line that says what is done, the figures."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rollwire.ops.bench.streams import bench_streams, steps
from rollwire.ops.figures import Figure
from rollwire.ops.stack import running_stack


def run_streams(
    bootstrap: str | None, *, partitions: int, workers: int, runs: int, seed: int, short: bool, grow: bool
) -> list[Figure]:
    """All figures, on the broker that is named or on one of its own that ends with the run."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with (
        nullcontext() if bootstrap else tempfile.TemporaryDirectory(prefix="rollwire-bench-") as folder,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        line = progress.add_task("starting", total=steps(runs, grow=grow))

        def report(word: str) -> None:
            progress.update(line, description=word, advance=1)

        with nullcontext() if folder is None else running_stack(Path(folder)) as stack:
            address = bootstrap if stack is None else stack.bootstrap
            return bench_streams(
                address or "",
                partitions=partitions,
                workers=workers,
                runs=runs,
                seed=seed,
                short=short,
                grow=grow,
                report=report,
            )
