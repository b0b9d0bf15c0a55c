"""What an archiver says at /metrics."""

from __future__ import annotations

import threading

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollwire.ops.archive_metrics import ArchiveCounts, exposed
from rollwire.schemas.errors import EnvironmentMissing
from rollwire.streams.archive.heads import LocalSigner, new_signing_key
from rollwire.streams.archive.run_archive import archive_round
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.log import Outgoing
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.store_memory import MemoryStore


def scraped(url: str) -> dict[str, float]:
    text = httpx.get(url).raise_for_status().text
    return {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}


def test_rounds_add_up_and_lag_is_told() -> None:
    clock = ManualClock()
    log, store, signer = MemoryLog({"rollouts": 1}, clock), MemoryStore(clock), LocalSigner(new_signing_key())
    counts = ArchiveCounts(clock)

    def work(wait_s: float) -> None:
        log.writer().write([Outgoing("rollouts", b"k", b"%d" % i) for i in range(300)])
        counts.add(
            archive_round(
                log,
                store,
                signer,
                name="rollwire",
                clock=clock,
                stop=threading.Event(),
                wait_s=wait_s,
            )
        )

    with exposed(counts, 0) as url:
        assert url is not None
        assert scraped(url)["rollwire_archive_records_total"] == 0
        work(wait_s=0.0)
        clock.advance(5)
        found = scraped(url)
        assert found["rollwire_archive_records_total"] == 300
        assert found["rollwire_archive_bytes_total"] > 0
        assert found["rollwire_archive_epoch"] == 2
        assert found["rollwire_archive_waiting_seconds"] == 0
        assert found["rollwire_archive_round_age_seconds"] == 5
        work(wait_s=60.0)
        clock.advance(7)
        found = scraped(url)
        assert found["rollwire_archive_records_total"] == 300
        assert found["rollwire_archive_waiting_seconds"] == 7
        with pytest.raises(EnvironmentMissing, match="--metrics-port"), exposed(counts, httpx.URL(url).port):
            pass


def test_without_a_port_nothing_listens() -> None:
    with exposed(ArchiveCounts(ManualClock()), None) as url:
        assert url is None
