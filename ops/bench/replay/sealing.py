"""`audit verify` as a side of the bench: the log is sealed once, then verified as often as it is measured."""

from __future__ import annotations

import time

from rollwire.ops.bench.replay.load import Source
from rollwire.schemas.errors import LogError
from rollwire.streams.archive.heads import LocalSigner, new_signing_key, trusted_keys
from rollwire.streams.archive.sealer import seal_epoch
from rollwire.streams.archive.verify import verify
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.store import ObjectStore


class SealedSource:
    """The history of a source, sealed under a key of its own. It is not archived: every record comes from the log."""

    def __init__(self, source: Source, store: ObjectStore) -> None:
        self._store = store
        self._name = source.prefix.rstrip(".")
        signer = LocalSigner(new_signing_key())
        self._trusted = trusted_keys(signer.public)
        log, clock = source.log(), SystemClock()
        while seal_epoch(log, store, signer, name=self._name, clock=clock) is not None:
            pass

    def verified(self, source: Source) -> float:
        """Seconds from the first head to the report. Raises `LogError` where it is not clean, or not of every record."""
        clock = SystemClock()
        began = time.perf_counter()
        report = verify(
            source.log(), self._store, name=self._name, trusted=self._trusted, now_us=clock.now_us()
        ).report
        took = time.perf_counter() - began
        if report.findings or report.checked["records of the log"] != source.records:
            raise LogError(f"of {source.records:,} records that were sealed `audit verify` says {report}")
        return took
