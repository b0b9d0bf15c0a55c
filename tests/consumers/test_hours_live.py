"""What gateways count of themselves, held against the topic."""

from __future__ import annotations

import msgspec
import pytest

from rollwire.consumers.audit.hours_live import SOURCE, Counters, Written, compare, parse_counters
from rollwire.producers.gateway import encode
from rollwire.producers.gateway.exposition import exposition
from rollwire.producers.gateway.ledger import Ledger
from rollwire.schemas.errors import ConfigError
from rollwire.streams.findings import Kind
from rollwire.streams.seams.log import Record

URL = "http://127.0.0.1:1/metrics"
STARTED_US = 1_767_225_600_500_000


def gateway(accepted: int = 10, *, repeated: int = 0, conflicting: int = 0, unknown: int = 0) -> Ledger:
    ledger = Ledger(STARTED_US)
    ledger.begin(accepted + conflicting + unknown + 3)
    ledger.accept(accepted, repeated)
    ledger.refuse("conflicting_repeat", conflicting)
    ledger.refuse("malformed", 2)
    ledger.drop("outcome_unknown", unknown)
    ledger.drop("overloaded", 1)
    return ledger


def shown(ledger: Ledger) -> tuple[Counters, ...]:
    return parse_counters(URL, exposition(ledger).decode())


def test_the_exposition_says_what_the_gateway_counted() -> None:
    (one,) = shown(gateway(10, repeated=2, conflicting=1, unknown=4))
    assert (one.received, one.accepted, one.refused, one.shed, one.pending) == (18, 10, 3, 5, 0)
    assert (one.repeated, one.conflicting, one.unknown, one.late, one.gap) == (2, 1, 4, 0, 0)
    assert one.started_us == STARTED_US
    assert (one.written, one.perhaps) == (9, 4)
    assert (one.url, one.topic) == (URL, "user-feedback")


def test_it_is_the_gateways_records_that_are_counted() -> None:
    assert encode.SOURCE.encode() == SOURCE
    written = Written(shown(gateway()))
    now, before = b"2026-01-01T00:00:00.500000Z", b"2026-01-01T00:00:00.499999Z"
    bench = b"rollwire/bench"
    for topic, source, told in (
        ("user-feedback", SOURCE, now),
        ("user-feedback", SOURCE, before),  # of an earlier life
        ("user-feedback", bench, now),
        ("user-feedback", SOURCE, b"soon"),
        ("user-feedback", SOURCE, b"2026-01-01T00:00:01"),
        ("rewards", SOURCE, now),
    ):
        headers: tuple[tuple[str, bytes | None], ...] = (("ce_source", source), ("ce_time", told))
        # The broker's clock may be behind, or ahead.
        written.take(Record(topic, 0, 0, 0, b"k", b"v", headers))
    assert written.records == 1


def test_what_was_acknowledged_and_is_not_there_is_unaccounted() -> None:
    counters = shown(gateway(10, repeated=2, conflicting=1))
    assert compare(counters, counters, 9).findings == ()
    (finding,) = compare(counters, counters, 8).findings
    assert finding.kind is Kind.UNACCOUNTED
    assert "1 are not there" in finding.detail
    assert URL in finding.where


def test_what_the_gateway_cannot_know_is_no_finding() -> None:
    counters = shown(gateway(10, unknown=4))
    for records in (10, 14):
        compared = compare(counters, counters, records)
        assert compared.findings == ()
        assert "more than" not in compared.notes[0]
    (note,) = compare(counters, counters, 15).notes
    assert "1 more than these tell of" in note


def test_events_that_come_meanwhile_do_not_matter() -> None:
    before, after = shown(gateway(10)), shown(gateway(20))
    for records in (10, 15, 20):
        compared = compare(before, after, records)
        assert compared.findings == ()
        assert "more than" not in compared.notes[0]
    again = tuple(msgspec.structs.replace(one, started_us=STARTED_US + 1) for one in after)
    assert "started again" in compare(before, again, 0).notes[0]


def test_counters_that_do_not_add_up_are_a_finding() -> None:
    ledger = gateway(10)
    ledger.received += 3
    counters = shown(ledger)
    (finding,) = compare(counters, counters, 10).findings
    assert finding.kind is Kind.UNACCOUNTED
    assert "3 differ" in finding.detail


def test_any_process_that_counts_events_may_be_asked() -> None:
    text = (
        '# TYPE rollwire_events_received_total counter\nrollwire_events_received_total{topic="rollouts"} 5\n'
        '# TYPE rollwire_events_accepted_total counter\nrollwire_events_accepted_total{topic="rollouts"} 4\n'
    )
    counters = parse_counters(URL, text)
    assert [(one.topic, one.gap, one.started_us) for one in counters] == [("rollouts", 1, None)]
    compared = compare(counters, counters, 0)
    assert len(compared.findings) == 1
    assert compared.notes == ()


@pytest.mark.parametrize("text", ["", "<html>", "# TYPE up gauge\nup 1\n", "rollwire_events_received_total{"])
def test_what_is_no_exposition_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="metrics: "):
        parse_counters(URL, text)
