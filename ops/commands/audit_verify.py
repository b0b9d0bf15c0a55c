"""`rollwire audit verify`: whether the history of a run is what was sealed."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter

from rollwire.ops.audit_seen import Seen, pinned_heads, read_seen, remember, seen_file
from rollwire.ops.auditing import JsonFile, auditing, conclude
from rollwire.ops.broker import DEFAULT_DIR, Bootstrap, Folder, Prefix
from rollwire.ops.commands.audit_progress import counting
from rollwire.ops.commands.weights_access import Bucket
from rollwire.ops.history import open_history
from rollwire.ops.signing import open_trusted
from rollwire.schemas.errors import ConfigError
from rollwire.streams.archive.stretches import Archive
from rollwire.streams.archive.verify import verify as verify_history
from rollwire.streams.findings import Kind
from rollwire.streams.seams.clock import SystemClock

_OF_HEADS: Final = frozenset(
    {
        Kind.HEAD_FORKED,
        Kind.HEAD_INVALID,
        Kind.HEAD_MISSING,
        Kind.HEAD_ROLLED_BACK,
        Kind.KEY_UNKNOWN,
        Kind.SIGNATURE_INVALID,
    }
)


def verify(
    *,
    sample: float | None = None,
    seed: int | None = None,
    public_key: tuple[Path, ...] = (),
    head: tuple[Path, ...] = (),
    memory: Annotated[bool, Parameter(negative="--no-memory")] = True,
    json: JsonFile = None,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    bucket: Bucket = None,
) -> int:
    """Hold log and archive against what was sealed: heads, their signatures, tables, trees, chains, and every record.

    Each finding names the first record that is not what was sealed. What retention, expiry or compaction took is a note, with
    the policy that did. The newest head is remembered in the folder of the stack (audit-seen.json), so that heads taken away or
    exchanged later are known.

    Parameters
    ----------
    sample
        Read this share of the segments only (0.1: one in ten), chosen anew each time; heads and tables are looked at in any case.
    seed
        Choose the sample by this number: the report of an earlier one names its own.
    public_key
        Public keys (PEM) to trust; by default the stack's own, signing.pub.
    head
        Copies of heads that were kept elsewhere: the store must have the same.
    memory
        Compare with the heads seen before, and remember the newest.
    """
    with auditing():
        if sample is not None and not 0 < sample <= 1:
            raise ConfigError(f"--sample {sample:g}: say a share above 0 and up to 1")
        trusted = open_trusted(dir, public_key)
        with open_history("audit-verify", dir=dir, bootstrap=bootstrap, prefix=prefix, bucket=bucket) as past:
            file = seen_file(dir)
            known = read_seen(file).get(past.name) if memory else None
            pinned = pinned_heads(head) | ({known.epoch: known.sha256} if known else {})
            clock = SystemClock()
            with counting("verifying") as progress:
                verified = verify_history(
                    past.live,
                    past.store,
                    name=past.name,
                    trusted=trusted,
                    now_us=clock.now_us(),
                    archive=Archive(past.store, past.name),
                    sample=sample,
                    seed=secrets.randbits(32) if seed is None else seed,
                    seen=pinned,
                    clock=clock,
                    progress=progress,
                )
            newest = verified.newest
            # A head is remembered once all of them are right: else the next audit would compare with what is wrong.
            wrong = any(finding.kind in _OF_HEADS for finding in verified.report.findings)
            if memory and newest is not None and not wrong:
                remember(file, past.name, Seen(newest.epoch, newest.digest))
        return conclude(verified.report, json)
