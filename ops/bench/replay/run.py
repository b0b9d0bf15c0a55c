"""Runs `rollwire bench replay`: a stack of its own in a temporary folder, topics of 1 kB and of 100 kB records, and what
audits do with them against a bare consumer of the same partitions; then a lineage rebuilt, and a demo trained again.

replay.verify_ratio_1kb, .verify_ratio_100kb   records a second of `audit verify` over those of the bare consumer (`reading.bare`)
replay.decode_ratio            the same of decoding 1 kB records to events with all checks
replay.decode_ratio_100kb      of 100 kB records
replay.records_ratio_1kb, .records_ratio_100kb   of reading records through `scan` and decoding none
export.ratio, .ratio_100kb     of `audit export` into a folder; a lake is held against the topic row by row before it is measured
replay.<side>_<size>_per_s     these rates; `bare_batches` reads by `consume()` as many at a time as `scan`
rebuild.deltas_ratio           a lineage of 50 versions of 100 MB, rebuilt and checked: seconds of fetching the same objects with
                               the same client over its seconds (`weights.py`)
rebuild.raw_mb_per_s, .deltas_mb_per_s   these rates; `raw_parts`: fetching by the rebuild's own requests, in parts
rebuild.training_equal         versions of a demo run of 40 steps that come out of training bit for bit as published
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Final, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rollwire.consumers.audit.rebuild_past import TOPICS as REBUILT
from rollwire.ops.bench.replay import reading, weights
from rollwire.ops.bench.replay.exporting import check_export, exported
from rollwire.ops.bench.replay.figures import Side, rate_figures, ratio, rounds
from rollwire.ops.bench.replay.load import FULL, QUICK, Size, Sizes, Source, filled
from rollwire.ops.bench.replay.sealing import SealedSource
from rollwire.ops.bench.replay.training import trained_again
from rollwire.ops.figures import Figure
from rollwire.ops.memory import tune_memory
from rollwire.ops.stack import StackInfo, running_stack
from rollwire.ops.stores import stack_store
from rollwire.ops.topics import apply_topics
from rollwire.schemas.catalogue import TOPICS
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.store import ObjectStore

Part = Literal["all", "verify", "decode", "rebuild", "training", "export"]
_RATE: Final = 1e-6  # of learning, as in RL post-training
Told = Callable[[str], None]


def run_replay(*, quick: bool, part: Part) -> list[Figure]:
    """All figures, or those of one part. Raises `LogError` where a side did not see, or make, what it should."""
    tune_memory()  # as every audit does
    sizes = QUICK if quick else FULL
    figures: list[Figure] = []
    with (
        tempfile.TemporaryDirectory(prefix="rollwire-bench-") as name,
        Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        ) as progress,
    ):
        line = progress.add_task("starting a stack", total=None)

        def told(word: str) -> None:
            progress.update(line, description=word)

        if part != "training":
            with running_stack(Path(name) / "stack") as stack:
                stack_store(stack, None).ensure_bucket()
                figures += stack_figures(stack, sizes, part, told)
        # After the others: a demo takes both cores.
        if part in ("all", "training"):
            figures.append(training_figure(Path(name) / "demo", sizes.steps, told))
    return figures


def stack_figures(
    stack: StackInfo, sizes: Sizes, part: Part, told: Told, prefix: str = "replay"
) -> list[Figure]:
    """Those that need a broker and a store, on topics under prefixes that begin with `prefix`."""
    figures: list[Figure] = []
    if part in ("all", "verify", "decode", "export"):
        for size in (sizes.small, sizes.large):
            figures += reading_figures(stack, size, sizes.rounds, part, told, f"{prefix}-{size.name}.")
    if part in ("all", "rebuild"):
        figures += rebuild_figures(stack, sizes, told, f"{prefix}-weights.")
    return figures


def reading_figures(
    stack: StackInfo, size: Size, count: int, part: Part, told: Told, prefix: str
) -> list[Figure]:
    told(f"{size.name}: writing {size.records:,} records")
    source = filled(stack.bootstrap, prefix, size, seed=0)
    sides, ratios = _sides(source, part, stack_store(stack, None))
    seconds = rounds(source, sides, count, told)
    return [*(ratio(name, side, seconds) for name, side in ratios.items()), *rate_figures(source, seconds)]


def _sides(source: Source, part: Part, store: ObjectStore) -> tuple[dict[str, Side], dict[str, str]]:
    """What is measured, and the ratios that are named after it."""
    size = source.size.name
    sides: dict[str, Side] = {"records": reading.records}
    ratios = {f"replay.records_ratio_{size}": "records"}
    if part in ("all", "verify"):
        sides["verify"] = SealedSource(source, store).verified
        ratios[f"replay.verify_ratio_{size}"] = "verify"
    if part in ("all", "decode"):
        sides["events"] = reading.events
        ratios["replay.decode_ratio" if size == "1kb" else f"replay.decode_ratio_{size}"] = "events"
    if part in ("all", "export"):
        check_export(source)
        sides["export"] = exported
        ratios["export.ratio" if size == "1kb" else f"export.ratio_{size}"] = "export"
    return sides, ratios


def rebuild_figures(stack: StackInfo, sizes: Sizes, told: Told, prefix: str) -> list[Figure]:
    apply_topics(stack.bootstrap, prefix, topics={name: TOPICS[name] for name in REBUILT})
    store = stack_store(stack, None)
    with closing(KafkaLog(stack.bootstrap, prefix, client_id="rollwire-bench")) as log:
        past = weights.published(
            log,
            store,
            mb=sizes.weights_mb,
            versions=sizes.versions,
            rate=_RATE,
            told=lambda version: told(f"publishing version {version} of {sizes.versions}"),
        )
    taken: list[weights.Sides] = []
    for number in range(1, sizes.rounds + 1):
        told(f"rebuilding {sizes.versions} versions, round {number} of {sizes.rounds}")
        taken.append(weights.measured(store, past))
    megabytes = taken[0].nbytes / 1e6
    raw, rebuilt = median(s.raw_s for s in taken), median(s.rebuilt_s for s in taken)
    parts = median(s.parts_s for s in taken)
    return [
        Figure(name="rebuild.deltas_ratio", value=raw / rebuilt, unit="x"),
        Figure(name="rebuild.raw_mb_per_s", value=megabytes / raw, unit="MB/s"),
        Figure(name="rebuild.raw_parts_mb_per_s", value=megabytes / parts, unit="MB/s"),
        Figure(
            name="rebuild.deltas_mb_per_s",
            value=megabytes / rebuilt,
            unit="MB/s",
            baseline=megabytes / raw,
        ),
    ]


def training_figure(folder: Path, steps: int, told: Told) -> Figure:
    found = trained_again(folder, steps=steps, told=told)
    return Figure(name="rebuild.training_equal", value=found.equal, unit="versions", baseline=found.versions)
