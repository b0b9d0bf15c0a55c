"""`/metrics`: the ledger and what stands beside it, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from rollwire.producers.gateway.ledger import Histogram, Ledger
from rollwire.schemas.metrics import Metric

MEDIA_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
TOPIC: Final = "user-feedback"


class LedgerCollector(Collector):
    """One look at the ledger, between two events of its loop: its numbers add up."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def collect(self) -> Iterable[Family]:
        ledger = self._ledger
        yield _counter("rollwire_events_received_total", "Events read", {(): ledger.received})
        yield _counter("rollwire_events_accepted_total", "Events acknowledged", {(): ledger.accepted})
        yield _counter(
            "rollwire_events_refused_total",
            "Events refused, by code",
            {(code,): count for code, count in ledger.refused.items()},
            "reason",
        )
        yield _counter(
            "rollwire_events_shed_total",
            "Events answered 429 or 5xx, by code",
            {(code,): count for code, count in ledger.shed.items()},
            "reason",
        )
        name: Metric = "rollwire_events_pending"
        pending = GaugeMetricFamily(name, "Events read and not answered", labels=["topic"])
        pending.add_metric([TOPIC], ledger.pending)
        yield pending
        began: Metric = "rollwire_feedback_start_time_seconds"
        yield GaugeMetricFamily(began, "Unix time from which on it counts", value=ledger.started_us / 1e6)
        yield _counter(
            "rollwire_feedback_repeated_total",
            "Accepted events that were in the log before",
            {(): ledger.repeated},
        )
        yield _counter(
            "rollwire_feedback_late_total",
            "Events acknowledged by the broker after their caller was told that the outcome is unknown",
            {(): ledger.late},
        )
        yield _histogram("rollwire_feedback_request_seconds", "Whole request to its answer", ledger.latency)
        yield _histogram("rollwire_feedback_commit_seconds", "One write to the log", ledger.commit)
        yield _histogram("rollwire_feedback_commit_events", "Events of one write", ledger.commit_events)


def exposition(ledger: Ledger) -> bytes:
    registry = CollectorRegistry()
    registry.register(LedgerCollector(ledger))
    return generate_latest(registry)


def _counter(
    name: Metric, text: str, counts: dict[tuple[str, ...], int], *labels: str
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=["topic", *labels])
    for values, count in counts.items():
        family.add_metric([TOPIC, *values], count)
    return family


def _histogram(name: Metric, text: str, histogram: Histogram) -> HistogramMetricFamily:
    buckets, below = [], 0
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        below += count
        buckets.append((bound, float(below)))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=histogram.sum)
