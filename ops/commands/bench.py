"""`rollwire bench ...`: measurements, as a table and in the common form."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter, validators
from rich.console import Console
from rich.table import Table

from rollwire.ops.figures import Figure, write_figures
from rollwire.schemas.errors import EnvironmentMissing

Json = Annotated[Path | None, Parameter(name="--json", help="Write the figures there, in the common form.")]
Positive = Annotated[int, Parameter(validator=validators.Number(gte=1))]

bench = App(name="bench", help="Measure parts of Rollwire on this machine.")


def show(title: str, figures: Sequence[Figure]) -> None:
    """The figures as a table on the terminal."""
    table = Table(title=title, title_justify="left")
    table.add_column("figure", no_wrap=True)
    for heading in ("value", "unit", "baseline", "ratio"):
        table.add_column(heading, justify="left" if heading == "unit" else "right")
    for figure in figures:
        baseline = "" if figure.baseline is None else f"{figure.baseline:.4g}"
        ratio = "" if figure.ratio is None else f"{figure.ratio:.3g}"
        table.add_row(figure.name, f"{figure.value:.4g}", figure.unit, baseline, ratio)
    # Into a pipe a table is never cut: it goes on to grep or awk.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


@bench.command
def delta(*, mib: Positive = 32, repeats: Positive = 3, seed: int = 0, json: Json = None) -> None:
    """Size and speed of weight deltas: the gap coder against XOR + zstd and full zstd, on one core.

    Parameters
    ----------
    mib
        Size of each measured state, MiB.
    repeats
        Runs of each measurement; the fastest counts.
    seed
        Of the synthetic weights and gradients.
    """
    from rollwire.ops.bench.delta import bench_delta

    figures = bench_delta(mib=mib, repeats=repeats, seed=seed)
    show(f"Weight deltas, {mib} MiB states, one core", figures)
    if json is not None:
        write_figures(json, f"rollwire bench delta --mib {mib} --repeats {repeats} --seed {seed}", figures)


@bench.command
def events(*, repeats: Positive = 5, seed: int = 0, json: Json = None) -> None:
    """Events to bytes and back with all checks, against json and bare fastavro, on one core.

    Parameters
    ----------
    repeats
        Runs of each measurement; the fastest counts.
    seed
        Of the measured events.
    """
    from rollwire.ops.bench.events import bench_events

    figures = bench_events(repeats=repeats, seed=seed)
    show("Events to bytes and back, one core", figures)
    if json is not None:
        write_figures(json, f"rollwire bench events --repeats {repeats} --seed {seed}", figures)


@bench.command
def codec(
    *, repeats: Positive = 5, short: Annotated[bool, Parameter(negative="")] = False, json: Json = None
) -> None:
    """Weight deltas of real fine-tuning steps: both coders against others and the entropy limits, on one core.

    The first run trains MiniLM for 20 steps at three learning rates (minutes); its snapshots stay in the user's cache.

    Parameters
    ----------
    repeats
        Runs of each measurement; the fastest counts.
    short
        Small synthetic steps, without zipnn: a look at whether it works, no measurement.
    """
    from rollwire.ops.bench.codec import bench_codec

    figures = bench_codec(repeats=repeats, short=short)
    show("Weight deltas of fine-tuning steps, one core", figures)
    if json is not None:
        command = f"rollwire bench codec --repeats {repeats}{' --short' if short else ''}"
        write_figures(json, command, figures)


@bench.command
def routing(*, repeats: Positive = 20, rollouts: Positive = 4096, seed: int = 0, json: Json = None) -> None:
    """Routing traces: size and speed on one core against int32 and memcpy; mismatch with and without replay and filter.

    Parameters
    ----------
    repeats
        Passes of each speed; the fastest counts.
    rollouts
        Rollouts sampled at each lag for the mismatch.
    seed
        Of the synthetic router, the warm start and the samples.
    """
    from rollwire.ops.bench.routing import bench_codec
    from rollwire.ops.bench.routing_mismatch import bench_mismatch

    figures = bench_codec(repeats=repeats, seed=seed) + bench_mismatch(rollouts=rollouts, seed=seed)
    show("Routing replay, one core", figures)
    if json is not None:
        command = f"rollwire bench routing --repeats {repeats} --rollouts {rollouts} --seed {seed}"
        write_figures(json, command, figures)


@bench.command
def catchup(*, mib: Positive = 4, seed: int = 0, json: Json = None) -> None:
    """What a replica 100 versions behind fetches, against one delta made just for it; from every start.

    Parameters
    ----------
    mib
        Size of the weights, MiB.
    seed
        Of the synthetic weights and gradients.
    """
    from rollwire.ops.bench.catchup import bench_catchup

    figures = bench_catchup(mib=mib, seed=seed)
    show(f"100 versions behind, {mib} MiB of weights", figures)
    if json is not None:
        write_figures(json, f"rollwire bench catchup --mib {mib} --seed {seed}", figures)


@bench.command
def pack(
    *, repeats: Annotated[int, Parameter(validator=validators.Number(gte=5))] = 5, json: Json = None
) -> None:
    """Layouts of steps: how even they are and what they take, against the plain method, on one core.

    1,024, 10,240 and 102,400 recorded lengths in groups of 16, for 64 and 512 ranks, with 128k tokens a microbatch.

    Parameters
    ----------
    repeats
        Runs of each case, 5 at least, ours and the plain method's in turn; the median counts.
    """
    from rollwire.ops.bench.pack import bench_pack

    figures = bench_pack(repeats=repeats)
    show("Layouts of steps, one core", figures)
    if json is not None:
        write_figures(json, f"rollwire bench pack --repeats {repeats}", figures)


@bench.command
def streams(
    *,
    runs: Positive = 5,
    partitions: Positive = 4,
    workers: Positive = 2,
    seed: int = 0,
    short: Annotated[bool, Parameter(negative="")] = False,
    grow: Annotated[bool, Parameter(negative="")] = False,
    bootstrap: str | None = None,
    json: Json = None,
) -> None:
    """assemble and pack on a real broker: against bare loops, against Faust, and their latency under an open loop.

    Names of the figures, and what each side does: docs/performance.md and the top of ops/bench/streams.py.

    Parameters
    ----------
    runs
        Measured runs of each side; they take turns, medians count.
    partitions
        Partitions of every topic.
    workers
        Processes of assemble, and of the bare loop that stands for it; not more than partitions.
    seed
        Of the rollouts' content.
    short
        Few groups: a look at whether it works, no measurement.
    grow
        Measure also how cost grows with partitions, processes and the size of a rollout.
    bootstrap
        host:port of a broker; without one, a stack of its own in a temporary folder.
    """
    from rollwire.ops.bench.streams_run import run_streams

    figures = run_streams(
        bootstrap, partitions=partitions, workers=workers, runs=runs, seed=seed, short=short, grow=grow
    )
    show("assemble and pack", figures)
    if json is not None:
        flags = f"{' --short' if short else ''}{' --grow' if grow else ''}"
        command = f"rollwire bench streams --runs {runs} --partitions {partitions} --workers {workers} --seed {seed}{flags}"
        write_figures(json, command, figures)


@bench.command
def sync(
    *,
    runs: Positive = 15,
    short: Annotated[bool, Parameter(negative="")] = False,
    only: str | None = None,
    coder: Literal["gap", "context"] = "gap",
    json: Json = None,
) -> None:
    """From the end of a step to the version that replicas serve, and how long the trainer is blocked for it.

    10 MB, 100 MB and 1 GB of weights with one replica, 100 MB with 8, and 4 replicas that hold a slice each, on a broker and
    an S3 server of its own in a temporary folder. Names of the figures: docs/performance.md and the top of ops/bench/sync.py.

    Parameters
    ----------
    runs
        Measured versions of the 100 MB case; medians count.
    short
        10 MB, few versions: a look at whether it works, no measurement.
    only
        One case: 10mb_1, 100mb_1, 100mb_8, 1gb_1 or slices.
    coder
        Of the deltas.
    """
    from rollwire.ops.bench.sync_run import run_sync

    figures = run_sync(runs=runs, short=short, only=only, coder=coder)
    show("Step end to served version", figures)
    if json is not None:
        flags = f"{' --short' if short else ''}{'' if only is None else f' --only {only}'}"
        flags += "" if coder == "gap" else f" --coder {coder}"
        write_figures(json, f"rollwire bench sync --runs {runs}{flags}", figures)


@bench.command
def feedback(
    *,
    quick: Annotated[bool, Parameter(negative="")] = False,
    part: Literal["all", "gateway", "attribution"] = "all",
    json: Json = None,
) -> None:
    """The feedback gateway under load and faults, its ledger from the topic, and attribution's speed; about 8 minutes.

    Singles against an empty answer, batches against a bare producer, latency at half the maximum, a tenfold burst, the broker
    paused, Redis killed, the gateway killed; all on a broker, an S3 server and a Redis of its own in a temporary folder.
    Names of the figures: docs/performance.md.

    Parameters
    ----------
    quick
        A minute: a look at whether it works, no measurement.
    part
        Only the gateway, or only attribution.
    """
    if find_spec("hdrh") is None:
        raise EnvironmentMissing(
            "the load generator needs hdrhistogram: install the bench extra (`pip install 'rollwire[bench]'`)"
        )
    from rollwire.ops.bench.feedback.run import run_feedback

    figures = run_feedback(quick=quick, part=part)
    show("Feedback under load", figures)
    if json is not None:
        flags = f"{' --quick' if quick else ''}{'' if part == 'all' else f' --part {part}'}"
        write_figures(json, f"rollwire bench feedback{flags}", figures)


@bench.command
def replay(
    *,
    quick: Annotated[bool, Parameter(negative="")] = False,
    part: Literal["all", "verify", "decode", "rebuild", "training", "export"] = "all",
    json: Json = None,
) -> None:
    """What audits cost, against a bare consumer of the same partitions and raw GETs of the same objects; about 6 minutes.

    Topics of 1 kB and of 100 kB records are read bare, as records, as events, verified and exported; a lineage of 50 versions of
    100 MB is rebuilt from deltas; a demo run of 40 steps is trained again. All on a broker and an S3 server of its own in a
    temporary folder. Names of the figures: docs/performance.md and the top of ops/bench/replay/run.py.

    Parameters
    ----------
    quick
        A minute: a look at whether it works, no measurement.
    part
        Only one part.
    """
    from rollwire.ops.bench.replay.run import run_replay

    figures = run_replay(quick=quick, part=part)
    show("What audits cost", figures)
    if json is not None:
        flags = f"{' --quick' if quick else ''}{'' if part == 'all' else f' --part {part}'}"
        write_figures(json, f"rollwire bench replay{flags}", figures)
