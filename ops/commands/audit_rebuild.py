"""`rollwire audit rebuild`: versions made anew, from snapshots and deltas or by training again."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from rollwire.consumers.audit.rebuild_deltas import DeltaRebuild
from rollwire.consumers.audit.rebuild_past import Past, read_past
from rollwire.consumers.audit.rebuild_run import Outcome, Told, Via, Wanted, by_deltas, by_training, wanted
from rollwire.consumers.audit.rebuild_training import TrainingRebuild
from rollwire.consumers.weights.anchor import anchor_file
from rollwire.kernels.tensors import State
from rollwire.ops.auditing import JsonFile, auditing, conclude
from rollwire.ops.broker import DEFAULT_DIR, Bootstrap, Folder, Prefix, Registry
from rollwire.ops.commands.weights_access import Bucket, Lineage
from rollwire.ops.history import History, open_history
from rollwire.ops.printing import bars
from rollwire.ops.rebuilding import deriving, learner_of, past_keys, past_stack
from rollwire.schemas.errors import ConfigError
from rollwire.streams.seams.store import ObjectStore


def rebuild(
    *,
    version: Annotated[int | None, Parameter(name="--version")] = None,
    via: Via = "deltas",
    all: Annotated[bool, Parameter(negative=())] = False,
    out: Path | None = None,
    json: JsonFile = None,
    bucket: Bucket = None,
    lineage: Lineage = None,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    schema_registry: Registry = None,
) -> int:
    """Make a version anew from what is kept, and compare it with what was published, bit for bit.

    The two ways are independent: `deltas` walks snapshots and deltas, `training` restores the nearest checkpoint before the
    version and takes the recorded steps again, with the settings that they say. Neither writes anything. Where bits differ,
    the first step and tensor that do are named, with the settings that are not the same here.

    Parameters
    ----------
    version
        By default the newest.
    via
        deltas or training.
    all
        Every version of the lineage, in one pass.
    out
        Write the version there, as one safetensors file; only where it came out as published.
    """
    with (
        auditing(),
        open_history(
            "audit-rebuild",
            dir=dir,
            bootstrap=bootstrap,
            prefix=prefix,
            schema_registry=schema_registry,
            bucket=bucket,
        ) as past,
    ):
        if all and (version is not None or out is not None):
            raise ConfigError(
                "--all goes with neither --version nor --out: it makes every version, and keeps none"
            )
        if out is not None and out.exists():
            raise ConfigError(f"{out} is there already: name a file that is not")
        read = read_past(past.log, lineage)
        if version is None and not all and read.past is not None:
            version = read.past.newest
        asked = wanted(read, version, lineage)
        with _progress(len(asked.versions), f"version by {via}") as told:
            outcome = _outcome(past, asked, via, told, dir, bucket)
        if out is not None and outcome.state is not None:
            write_state(out, outcome.state)
            sys.stdout.write(f"{out}: version {version}, {out.stat().st_size:,} bytes\n")
        return conclude(outcome.report, json)


def write_state(file: Path, state: State) -> None:
    """One safetensors file, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(anchor_file(state, sorted(state)))
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def _outcome(past: History, asked: Wanted, via: Via, told: Told, folder: Path, bucket: str | None) -> Outcome:
    known = asked.past
    if known is None or via == "deltas":
        with closing(DeltaRebuild(past.store, known or Past("", "", {}, {}, ()))) as deltas:
            return by_deltas(deltas, asked, told)
    if not known.steps:
        raise ConfigError(
            f"lineage {known.lineage} has no train-steps: nothing can be trained again; use --via deltas"
        )
    log = deriving(past.log, known)
    connect = past_stack(past, folder, bucket, known.lineage if log.derives() else None)
    keys = past_keys(folder)
    training = TrainingRebuild(
        log,
        known,
        lambda recipe: learner_of(recipe, log, past.store, known, connect=connect, keys=keys),
        lambda number: published(past.store, known, number),
    )
    with closing(training):
        return by_training(training, asked, told)


def published(store: ObjectStore, past: Past, version: int) -> State | None:
    """By deltas; None where none lead there."""
    with closing(DeltaRebuild(store, past)) as deltas:
        (made,) = deltas.versions([version])
        return None if made.digest is None else deltas.state


@contextmanager
def _progress(total: int, what: str) -> Iterator[Told]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with bars(*columns) as shown:
        line = shown.add_task(what, total=total)
        yield lambda _: shown.advance(line)
