"""Runs `rollwire bench sync`: a stack of its own in a temporary folder, a line that says what is done, the figures."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from rollwire.kernels.delta.encode import Coder
from rollwire.ops.bench.sync import bench_sync, cases
from rollwire.ops.bench.sync_replica import Where
from rollwire.ops.figures import Figure
from rollwire.ops.stack import StackInfo, running_stack
from rollwire.ops.topics import apply_topics


def where_of(stack: StackInfo, prefix: str = "rollwire.") -> Where:
    return Where(
        stack.bootstrap,
        prefix,
        stack.s3_endpoint or "",
        stack.bucket,
        stack.access_key or "",
        stack.secret_key or "",
    )


def run_sync(*, runs: int, short: bool, only: str | None, coder: Coder) -> list[Figure]:
    """All figures, or those of the case `only`."""
    todo = [case for case in cases(short=short, runs=runs) if only in (None, case.name)]
    with (
        tempfile.TemporaryDirectory(prefix="rollwire-bench-") as folder,
        Progress(
            TextColumn("{task.description}"), TimeElapsedColumn(), console=Console(stderr=True)
        ) as progress,
    ):
        line = progress.add_task("starting a stack", total=None)
        with running_stack(Path(folder)) as stack:
            apply_topics(stack.bootstrap, "rollwire.")
            where_of(stack).store().ensure_bucket()
            return bench_sync(
                where_of(stack), todo, lambda word: progress.update(line, description=word), coder=coder
            )
