"""`/metrics` of an archiver, as Prometheus reads it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollwire.ops.http_server import served
from rollwire.schemas.errors import EnvironmentMissing
from rollwire.schemas.metrics import Metric
from rollwire.streams.archive.run_archive import Round
from rollwire.streams.seams.clock import Clock

_LOGGER: Final = structlog.get_logger("rollwire.archive")


class ArchiveCounts(Collector):
    """Adds up rounds. Thread-safe: the archiver adds, who scrapes reads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._records = self._bytes = self._expired = self._findings = self._epoch = 0
        self._waiting_ms: int | None = None
        self._round_us: int | None = None

    def add(self, one: Round) -> None:
        with self._lock:
            self._records += one.copied.records
            self._bytes += one.copied.stored_bytes
            self._expired += one.deleted
            self._findings = len(one.copied.findings)
            self._epoch = one.sealed.head.epoch if one.sealed.head else 0
            self._waiting_ms = one.copied.waiting_ms
            self._round_us = self._clock.now_us()

    def collect(self) -> Iterable[Family]:
        with self._lock:
            yield _counter("rollwire_archive_records_total", "Records copied", self._records)
            yield _counter("rollwire_archive_bytes_total", "Bytes stored", self._bytes)
            yield _counter("rollwire_archive_expired_total", "Stretches deleted by policy", self._expired)
            yield _gauge("rollwire_archive_epoch", "The newest sealed epoch", self._epoch)
            yield _gauge(
                "rollwire_archive_wrong_segments", "Segments that the log has otherwise", self._findings
            )
            if self._round_us is not None:
                now_us = self._clock.now_us()
                waiting = 0.0 if self._waiting_ms is None else max(0.0, now_us / 1e6 - self._waiting_ms / 1e3)
                yield _gauge(
                    "rollwire_archive_waiting_seconds", "Age of the oldest sealed record not copied", waiting
                )
                yield _gauge(
                    "rollwire_archive_round_age_seconds",
                    "Since the last round that ended well",
                    (now_us - self._round_us) / 1e6,
                )


@contextmanager
def exposed(counts: ArchiveCounts, port: int | None) -> Iterator[str | None]:
    """`/metrics` on this port of this machine (0: a free one), for as long as the `with` lasts; its URL. None: nowhere.

    Raises `EnvironmentMissing` where the port is taken.
    """
    if port is None:
        yield None
        return
    registry = CollectorRegistry()
    registry.register(counts)

    def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    try:
        with served(Starlette(routes=[Route("/metrics", metrics)]), port=port) as at:
            _LOGGER.info("archive.metrics", url=f"{at.url}/metrics")
            yield f"{at.url}/metrics"
    except OSError as error:
        raise EnvironmentMissing(f"port {port}: {error}; choose another with --metrics-port") from error


def _counter(name: Metric, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)


def _gauge(name: Metric, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)
