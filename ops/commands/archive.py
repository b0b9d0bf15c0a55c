"""`rollwire archive`: seals the history of a run and copies it into the store, so that it outlives retention."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from rollwire.ops.archive_metrics import ArchiveCounts, exposed
from rollwire.ops.auditing import JsonFile, auditing, conclude
from rollwire.ops.broker import DEFAULT_DIR, Bootstrap, Folder, Prefix, run_bucket
from rollwire.ops.commands.weights_access import Bucket
from rollwire.ops.history import open_history
from rollwire.ops.printing import bars
from rollwire.ops.role_run import open_store
from rollwire.ops.signing import open_sealing
from rollwire.ops.stack import read_stack
from rollwire.ops.stopping import stop_on_signals
from rollwire.streams.archive.run_archive import ArchiveConfig, Round, Watch, archive_round, run_archive
from rollwire.streams.findings import Report
from rollwire.streams.seams.clock import SystemClock


def archive(
    *,
    once: Annotated[bool, Parameter(negative=())] = False,
    every: Annotated[float, Parameter(validator=validators.Number(gt=0))] = 60.0,
    wait: Annotated[float | None, Parameter(validator=validators.Number(gte=0))] = None,
    public_key: Annotated[tuple[Path, ...], Parameter(negative=())] = (),
    metrics_port: Annotated[int | None, Parameter(validator=validators.Number(gte=0, lte=65_535))] = None,
    json: JsonFile = None,
    bucket: Bucket = None,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
) -> int:
    """Seal what is written, and copy closed stretches of every topic into the store, until told to stop.

    History then outlives the topics' retention: every audit reads across archive and log as one. How long a topic is archived
    says its `archived` in docs/topics.md. It may be ended at any moment, by kill -9 too: whoever comes next goes on there.

    Parameters
    ----------
    once
        One round, and end: all that is there now is sealed and copied. Exit code 1 where the log is not what was sealed.
    every
        Seconds between two rounds.
    wait
        Gather a partition's new records until the oldest has this age in seconds; by default 600, and 0 with --once.
    public_key
        File of a key by which older heads were signed: they are gone on from as well. May be given several times.
    metrics_port
        Serve /metrics on this port of this machine; 0: a free one, named in the log.
    """
    stop = threading.Event()
    stop_on_signals(stop)
    with (
        auditing() if once else nullcontext(),
        open_history("archive", dir=dir, bootstrap=bootstrap, prefix=prefix, bucket=bucket) as past,
    ):
        store = open_store(read_stack(dir), bucket or run_bucket(dir, past.at.prefix))
        store.probe()
        signer, trusted = open_sealing(dir, public_key)
        clock = SystemClock()
        if not once:
            config = ArchiveConfig(every_s=every, wait_s=ArchiveConfig().wait_s if wait is None else wait)
            counts = ArchiveCounts(clock)
            with exposed(counts, metrics_port):
                run_archive(
                    past.live,
                    store,
                    signer,
                    config,
                    name=past.name,
                    clock=clock,
                    stop=stop,
                    trusted=trusted,
                    done=counts.add,
                )
            return 0
        past.demand_run()
        with _progress() as watch:
            one = archive_round(
                past.live,
                store,
                signer,
                name=past.name,
                clock=clock,
                stop=stop,
                wait_s=wait or 0.0,
                trusted=trusted,
                watch=watch,
            )
    return conclude(_report(one), json)


def _report(one: Round) -> Report:
    copied = one.copied
    counts = {
        "epochs sealed": len(one.heads),
        "stretches copied": copied.stretches,
        "records copied": copied.records,
        "bytes stored": copied.stored_bytes,
        "stretches expired": one.deleted,
    }
    return Report(command="archive", findings=copied.findings, checked=counts, notes=copied.notes)


@contextmanager
def _progress() -> Iterator[Watch]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,} records"),
        TimeRemainingColumn(),
    )
    with bars(*columns) as shown:
        yield _Bars(shown)


class _Bars:
    def __init__(self, shown: Progress) -> None:
        self._shown = shown
        self._seal = shown.add_task("sealing", total=None)
        self._copy = shown.add_task("copying", total=None, visible=False)

    def sealed(self, records: int) -> None:
        self._shown.advance(self._seal, records)

    def planned(self, records: int) -> None:
        self._shown.update(self._seal, visible=False)
        self._shown.update(self._copy, total=records, visible=True)

    def copied(self, records: int) -> None:
        self._shown.advance(self._copy, records)
