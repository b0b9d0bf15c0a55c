"""Whatever is refused can be written down: a refusal never stops what comes behind it."""

from __future__ import annotations

import pytest

from rollwire.schemas.codec import decode
from rollwire.schemas.errors import Refused
from rollwire.schemas.records import DeadLetter, Header, Position
from rollwire.streams.dead_letter import KEPT_BYTES, KEPT_HEADERS, cut, dead_letter
from rollwire.streams.seams.limits import check_size
from rollwire.streams.seams.log import Record

TIME_US = 1_767_225_600_000_000
POISON = Record(
    "rollouts", 2, 43, TIME_US // 1_000, b"k\xff", b"hello", (("a", b"\xff"), ("a", None), ("", b""))
)


def written(record: Record, refused: Refused) -> DeadLetter:
    out = dead_letter(record, refused, refused_by="assemble", time_us=TIME_US)
    check_size(out)
    event = decode(out.topic, out.value, out.headers, out.key)
    assert isinstance(event, DeadLetter)
    return event


def test_the_event_is_kept_whole() -> None:
    letter = written(POISON, Refused("not_framed", "5 bytes"))
    assert letter.source == Position(topic="rollouts", partition=2, offset=43)
    assert (letter.key, letter.value) == (b"k\xff", b"hello")
    assert letter.headers == (
        Header(key="a", value=b"\xff"),
        Header(key="a", value=None),
        Header(key="", value=b""),
    )
    assert (letter.reason, letter.detail) == ("not_framed", "5 bytes")


@pytest.mark.parametrize("value", [None, b"", b"\xff" * (8 * 1024 * 1024)])
def test_any_value_that_a_source_can_hold_fits(value: bytes | None) -> None:
    assert written(POISON._replace(value=value), Refused("too_large", "x")).value == value


def test_too_many_headers_are_cut_and_said() -> None:
    record = POISON._replace(headers=(("h", b""),) * 100_000)
    letter = written(record, Refused("header_mismatch", "h stands there twice"))
    assert len(letter.headers) == KEPT_HEADERS
    assert cut(letter) is not None
    assert "of 100000 headers the first 10000 are kept" in letter.detail


HUGE = 12 * 1024 * 1024


@pytest.mark.parametrize(
    "record",
    [
        POISON._replace(value=bytes(HUGE)),
        POISON._replace(key=bytes(HUGE), value=None),
        POISON._replace(headers=(("a", b"1"), ("h", bytes(HUGE)), ("z", None))),
        POISON._replace(headers=(("\u20ac" * (HUGE // 3), b"1"),)),
        POISON._replace(headers=(("h", bytes(2_000)),) * 9_000),
    ],
    ids=["value", "key", "header", "name", "headers"],
)
def test_a_record_that_was_small_only_compressed_is_cut_and_said(record: Record) -> None:
    letter = written(record, Refused("not_framed", "x"))
    assert f"the first {KEPT_BYTES} are kept" in letter.detail
    assert cut(letter) == f"only its first {KEPT_BYTES} bytes were kept"
    assert (letter.key or b"") == (record.key or b"")[:KEPT_BYTES]
    assert (record.value or b"").startswith(letter.value or b"")
    assert cut(written(POISON, Refused("not_framed", "x"))) is None


def test_text_that_is_no_unicode_is_spelt_out() -> None:
    record = POISON._replace(headers=(("\ud800", b""),))
    letter = written(record, Refused("malformed", "odd \udcff"))
    assert letter.headers[0].key == "\\ud800"
    assert letter.detail == "odd \\udcff"


def test_headers_are_those_of_kafka_streams_dead_letter_queues() -> None:
    """KIP-1034, ExceptionHandlerUtils of Kafka Streams: names, and numbers as decimal text; no stack trace, nothing crashed."""
    out = dead_letter(POISON, Refused("not_framed", "5 bytes"), refused_by="assemble", time_us=TIME_US)
    assert [header for header in out.headers if header[0].startswith("__streams.")] == [
        ("__streams.errors.exception", b"not_framed"),
        ("__streams.errors.message", b"5 bytes"),
        ("__streams.errors.topic", b"rollouts"),
        ("__streams.errors.partition", b"2"),
        ("__streams.errors.offset", b"43"),
    ]
