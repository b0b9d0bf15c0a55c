"""JSON in: what one parser takes, and how it says no (C71, C74, C76)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwire.producers.gateway.access import Refusal
from rollwire.producers.gateway.dialects.rollwire import RollwireDialect
from rollwire.producers.gateway.dialects.seam import Said
from rollwire.producers.gateway.item import Item, parse_array, parse_lines, parse_one

EVENT = b'{"rollout_id": "r", "signal": "thumb", "value": 1}'


def code_of(raw: bytes) -> tuple[str, str]:
    refused = parse_one(raw)
    assert isinstance(refused, Refusal)
    assert refused.status == 400
    return refused.code, refused.field


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("NaN", "not_finite"),
        ("Infinity", "not_finite"),
        ("-Infinity", "not_finite"),
        ("1e999", "not_finite"),
        ("-1e999", "not_finite"),
        ('"1"', "wrong_type"),
        ("null", "wrong_type"),
        ("[1]", "wrong_type"),
        ("{}", "wrong_type"),
    ],
)
def test_c71_what_is_no_number_is_refused_with_its_field(value: str, code: str) -> None:
    assert code_of(f'{{"rollout_id": "r", "signal": "s", "value": {value}}}'.encode()) == (code, "value")


def test_c71_minus_zero_is_kept_as_given() -> None:
    item = parse_one(b'{"rollout_id": "r", "signal": "s", "value": -0.0}')
    assert isinstance(item, Item)
    assert str(item.value) == "-0.0"


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b'{"rollout_id": "r", "signal": "\\ud83d"}', "malformed"),
        (b'{"rollout_id": "r", "signal": "\\ud83d\\u0041"}', "malformed"),
        (b'{"rollout_id": "r", "signal": "\xff"}', "malformed"),
        (b'{"rollout_id": "r", "signal": "a\x00b"}', "malformed"),
        (b"\xef\xbb\xbf" + EVENT, "malformed"),
        (EVENT + b" x", "malformed"),
        (b"", "malformed"),
        (b"[" * 100_000, "wrong_type"),
        (b'{"rollout_id":' * 100_000, "wrong_type"),
        (b"17", "wrong_type"),
    ],
)
def test_c74_c76_what_is_no_json_of_ours_is_refused(raw: bytes, code: str) -> None:
    assert code_of(raw)[0] == code


def test_c74_emoji_stay_as_they_are() -> None:
    family = "👨‍👩‍👧 �"
    for raw in (
        json.dumps({"rollout_id": "r", "signal": "comment", "comment": family}),
        json.dumps({"rollout_id": "r", "signal": "comment", "comment": family}, ensure_ascii=False),
    ):
        item = parse_one(raw.encode())
        assert isinstance(item, Item)
        assert item.comment == family


@pytest.mark.parametrize(
    "raw",
    [
        b'{"rollout_id": "a", "rollout_id": "b", "signal": "s"}',
        b'{"rollout_id": "a", "signal": "s", "value": 1, "value": 2}',
        b'{"rollout_id": "a", "signal": "s", "label": "\\"", "label": "x"}',
        b'{"rollout_id": "a", "signal": "s", "comment": null, "comment": "\\\\"}',
        b'{"rollout_id": "a", "signal": "s", "happened_at": 1, "happened_at": "1"}',
    ],
)
def test_c76_a_key_that_stands_there_twice_is_refused(raw: bytes) -> None:
    assert code_of(raw)[0] == "repeated_key"
    lines = parse_lines(EVENT + b"\n" + raw)
    assert isinstance(lines[0], Item)
    assert isinstance(lines[1], Refusal)
    assert lines[1].field == "items[1]"


def test_a_backslash_or_a_quotation_mark_in_a_text_is_no_second_key() -> None:
    raw = json.dumps({"rollout_id": "r", "signal": "s", "comment": 'a "quoted": \\ word', "label": None})
    assert isinstance(parse_one(raw.encode()), Item)


def test_fields_that_are_not_known_or_missing_are_named() -> None:
    assert code_of(b'{"rollout_id": "r", "signal": "s", "vaule": 1}') == ("unknown_field", "vaule")
    assert code_of(b'{"rollout_id": "r"}') == ("missing_field", "signal")


texts = st.text(st.characters(codec="utf-8"), max_size=20)
objects = st.fixed_dictionaries(
    {"rollout_id": texts, "signal": texts},
    optional={
        "value": st.floats(allow_nan=False, allow_infinity=False) | st.booleans(),
        "happened_at": texts | st.none() | st.floats(0, 1e9),
        "feedback_id": texts | st.none(),
        "label": texts | st.none(),
        "comment": texts | st.none(),
        "subject": texts | st.none(),
    },
)


@given(st.lists(objects, min_size=1, max_size=5), st.booleans())
def test_a_batch_says_the_same_as_its_events_apart(events: list[dict[str, Any]], ascii_: bool) -> None:
    lines = [json.dumps(event, ensure_ascii=ascii_).encode() for event in events]
    apart = [parse_one(line) for line in lines]
    assert all(isinstance(item, Item) for item in apart)
    assert parse_lines(b"\n\n".join(lines) + b"\n") == apart
    assert parse_array(b"[" + b" ,".join(lines) + b"]") == apart


@given(objects, st.sampled_from(["rollout_id", "signal", "value", "comment"]), texts | st.booleans())
def test_a_second_key_is_seen_whatever_stands_around_it(
    event: dict[str, Any], key: str, again: str | bool
) -> None:
    first = {"value": True, "comment": "x"} | event
    second = again if isinstance(again, bool) is (key == "value") else (True if key == "value" else "y")
    raw = json.dumps(first)[:-1] + f", {json.dumps(key)}: {json.dumps(second)}}}"
    assert code_of(raw.encode())[0] == "repeated_key"


@pytest.mark.parametrize(
    ("body", "media_type", "batch", "count"),
    [
        (EVENT, "application/json", False, 1),
        (EVENT, "", False, 1),
        (b" [" + EVENT + b"]", "application/json", True, 1),
        (EVENT + b"\n" + EVENT, "application/x-ndjson", True, 2),
        (EVENT, "application/x-ndjson", True, 1),
        (EVENT + b"\n" + EVENT, "text/plain", True, 2),
        (EVENT.replace(b", ", b",\n"), "text/plain", False, 1),
    ],
)
def test_the_form_of_a_body_says_whether_it_is_a_batch(
    body: bytes, media_type: str, batch: bool, count: int
) -> None:
    said = RollwireDialect().parse(body, media_type, 10)
    assert isinstance(said, Said)
    assert (said.batch, len(said.items)) == (batch, count)


@pytest.mark.parametrize(
    ("body", "media_type", "code"),
    [
        (b"[]", "application/json", "empty"),
        (b"\n\n", "application/x-ndjson", "empty"),
        (b"[" + b",".join([EVENT] * 11) + b"]", "application/json", "too_many"),
        (b"\n".join([EVENT] * 11), "application/x-ndjson", "too_many"),
        (b"[" + b"1," * 2_000_000 + b"1]", "application/json", "too_many"),
        (b"[" * 100_000, "application/json", "malformed"),
        (EVENT, "application/xml", "media_type_unknown"),
    ],
)
def test_c76_a_batch_is_counted_before_it_is_read(body: bytes, media_type: str, code: str) -> None:
    refused = RollwireDialect().parse(body, media_type, 10)
    assert isinstance(refused, Refusal)
    assert refused.code == code
