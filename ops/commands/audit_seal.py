"""`rollwire audit seal`: seals what was written, once or every minute."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from rollwire.ops.auditing import JsonFile, auditing, conclude
from rollwire.ops.broker import DEFAULT_DIR, Bootstrap, Folder, Prefix
from rollwire.ops.commands.audit_progress import counting
from rollwire.ops.commands.weights_access import Bucket
from rollwire.ops.history import open_history
from rollwire.ops.printing import console
from rollwire.ops.signing import open_sealing
from rollwire.ops.stopping import stop_on_signals
from rollwire.streams.archive.heads import Head
from rollwire.streams.archive.sealer import run_sealer
from rollwire.streams.findings import Report
from rollwire.streams.seams.clock import SystemClock


def seal(
    *,
    once: Annotated[bool, Parameter(negative=())] = False,
    every: Annotated[float, Parameter(validator=validators.Number(gt=0))] = 60.0,
    public_key: tuple[Path, ...] = (),
    lock_days: Annotated[float, Parameter(validator=validators.Number(gte=0))] = 0.0,
    json: JsonFile = None,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    bucket: Bucket = None,
) -> int:
    """Seal what was written since the last epoch: segments, their chain, a Merkle tree, and a signed head in the store.

    It runs until it is told to stop, and seals once more then. `rollwire archive` seals as well: one of the two is enough, two
    do no harm.

    Parameters
    ----------
    once
        Seal what is there, and end.
    every
        Seconds between two epochs.
    public_key
        Public keys (PEM) that earlier epochs were signed by, where the key was changed since; the signer's own counts always.
    lock_days
        For so many days nobody can delete or replace what is sealed, not its owner either; where the bucket has an object lock.
    """
    with (
        auditing(),
        open_history("audit-seal", dir=dir, bootstrap=bootstrap, prefix=prefix, bucket=bucket) as past,
    ):
        signer, trusted = open_sealing(dir, public_key)
        past.store.probe()
        out = console()
        heads: list[Head] = []

        def sealed(head: Head) -> None:
            heads.append(head)
            out.print(
                f"epoch {head.epoch:,}: {head.size:,} segments, "
                f"{sum(p.records for p in head.partitions):,} records so far, signed by {head.key_id}"
            )

        stop = threading.Event()
        if once:
            past.demand_run()
            stop.set()  # a sealer that is stopped seals what is there, and ends
        else:
            stop_on_signals(stop)
        with counting("sealing") if once else nullcontext(lambda _: None) as progress:
            run_sealer(
                past.live,
                past.store,
                signer,
                name=past.name,
                clock=SystemClock(),
                stop=stop,
                every_s=every,
                trusted=trusted,
                lock_s=lock_days * 86_400,
                sealed=sealed,
                progress=progress,
            )
        return conclude(
            Report(
                command="seal",
                findings=(),
                checked={"epochs": len(heads), "segments": sum(head.size for head in heads)},
                notes=() if heads or not once else ("nothing was written since the last epoch",),
            ),
            json,
        )
