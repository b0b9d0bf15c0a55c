"""`rollwire audit seal`: seals what was written, once or every minute."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rollwire.ops.auditing import JsonFile, auditing, conclude, console
from rollwire.ops.broker import DEFAULT_DIR, Bootstrap, Folder, Prefix
from rollwire.ops.commands.audit_progress import counting
from rollwire.ops.commands.weights_access import Bucket
from rollwire.ops.history import open_history
from rollwire.ops.signing import open_signer, open_trusted
from rollwire.ops.stopping import stop_on_signals
from rollwire.streams.archive.heads import Head, trusted_keys
from rollwire.streams.archive.sealer import run_sealer, seal_epoch
from rollwire.streams.findings import Report
from rollwire.streams.seams.clock import SystemClock


def seal(
    *,
    once: Annotated[bool, Parameter(negative=())] = False,
    every: float = 60.0,
    public_key: tuple[Path, ...] = (),
    lock_days: float = 0.0,
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
        signer, clock = open_signer(dir), SystemClock()
        trusted = {**(open_trusted(dir, public_key) if public_key else {}), **trusted_keys(signer.public)}
        past.store.probe()
        lock_s = lock_days * 86_400
        out = console()
        heads: list[Head] = []

        def sealed(head: Head) -> None:
            heads.append(head)
            out.print(
                f"epoch {head.epoch:,}: {head.size:,} segments, "
                f"{sum(p.records for p in head.partitions):,} records so far, signed by {head.key_id}"
            )

        if once:
            past.demand_run()
            with counting("sealing") as progress:
                while head := seal_epoch(
                    past.live,
                    past.store,
                    signer,
                    name=past.name,
                    clock=clock,
                    trusted=trusted,
                    progress=progress,
                ):
                    sealed(head)
        else:
            stop = threading.Event()
            stop_on_signals(stop)
            run_sealer(
                past.live,
                past.store,
                signer,
                name=past.name,
                clock=clock,
                stop=stop,
                every_s=every,
                trusted=trusted,
                lock_s=lock_s,
                sealed=sealed,
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
