"""The same facts as OpenTelemetry's gen_ai.evaluation.result: one record inside."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from rollwire.producers.gateway.access import Refusal
from rollwire.producers.gateway.commit import CONFLICTING, NEW
from rollwire.producers.gateway.dialects.otel import OtelDialect
from rollwire.producers.gateway.dialects.seam import Said
from rollwire.producers.gateway.item import Item
from rollwire.producers.gateway.records import Entry
from rollwire.schemas.ids import new_group_id
from rollwire.streams.seams.log import Outgoing

ROLLOUT = f"{new_group_id(time.time_ns() // 1_000, 3)}.0"
VALUES = {str: "stringValue", bool: "boolValue", float: "doubleValue", int: "intValue"}


def record(name: str = "gen_ai.evaluation.result", **attributes: Any) -> dict[str, Any]:
    said = {"gen_ai.evaluation.name": "rating", "gen_ai.response.id": ROLLOUT} | {
        key.replace("__", "."): value for key, value in attributes.items()
    }
    listed = [
        {"key": key, "value": {VALUES[type(value)]: value}} for key, value in said.items() if value != ""
    ]
    return {"timeUnixNano": "1789999999123456789", "eventName": name, "attributes": listed}


def parse(*records: dict[str, Any], most: int = 10) -> Said | Refusal:
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "shop"}}]}
    body = {
        "resourceLogs": [{"resource": resource, "scopeLogs": [{"scope": {}, "logRecords": list(records)}]}]
    }
    return OtelDialect().parse(json.dumps(body).encode(), "application/json", most)


def test_attributes_are_the_fields() -> None:
    said = parse(
        record(
            gen_ai__evaluation__score__value=0.5,
            gen_ai__evaluation__explanation="half of it",
            user__id="me",
            rollwire__feedback_id="f1",
        ),
        record(gen_ai__evaluation__name="accept", gen_ai__evaluation__score__label="accepted"),
        record(gen_ai__evaluation__score__value=1),
    )
    assert isinstance(said, Said)
    assert said.items[0] == Item(
        rollout_id=ROLLOUT,
        signal="rating",
        value=0.5,
        happened_at=1789999999.1234567,
        feedback_id="f1",
        label=None,
        comment="half of it",
        subject="me",
    )
    labelled, whole = said.items[1:]
    assert isinstance(labelled, Item)
    assert (labelled.signal, labelled.label) == ("accept", "accepted")
    assert isinstance(whole, Item)
    assert whole.value == 1.0


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        (record("http.request"), "not_an_evaluation"),
        (record(gen_ai__evaluation__name=""), "missing_field"),
        (record(gen_ai__response__id=""), "missing_field"),
        (record(gen_ai__evaluation__name=17), "wrong_type"),
        (record(gen_ai__evaluation__score__value="0.5"), "wrong_type"),
        (record() | {"timeUnixNano": "soon"}, "time_invalid"),
        (record() | {"attributes": record()["attributes"] * 2}, "repeated_key"),
    ],
)
def test_a_record_that_is_no_evaluation_is_refused_by_itself(changed: dict[str, Any], code: str) -> None:
    said = parse(record(gen_ai__evaluation__score__value=1.0), changed)
    assert isinstance(said, Said)
    assert isinstance(said.items[0], Item)
    refused = said.items[1]
    assert isinstance(refused, Refusal)
    assert (refused.code, refused.field) == (code, "resourceLogs[0].scopeLogs[0].logRecords[1]")


def test_what_is_no_request_is_refused_whole() -> None:
    dialect = OtelDialect()
    for body, media_type, code in (
        (b"{}", "application/x-protobuf", "media_type_unknown"),
        (b"{", "application/json", "malformed"),
        (b"{}", "application/json", "missing_field"),
        (b'{"resourceLogs": []}', "application/json", "empty"),
        (b'{"resourceLogs": {}}', "application/json", "wrong_type"),
        (b'{"resourceLogs":' + b"[" * 100_000, "application/json", "wrong_type"),
    ):
        refused = dialect.parse(body, media_type, 10)
        assert isinstance(refused, Refusal)
        assert refused.code == code
    many = parse(*[record()] * 11)
    assert isinstance(many, Refusal)
    assert many.code == "too_many"
    status = json.loads(dialect.problem(Refusal(503, "unavailable", "later", "", 1.0), "r1").body)
    assert status["code"] == 14
    assert "r1" in status["message"]


def test_the_answer_is_otlp_s_partial_success() -> None:
    dialect = OtelDialect()
    said = parse(record())
    assert isinstance(said, Said)
    entry = Entry(("acme", "f1"), b"d" * 16, "client", Outgoing("user-feedback", b"k", b"v"))
    assert dialect.answer(said, [entry], (), "r1").body == b"{}"
    refusal = Refusal(400, "late", "too old", "logRecords[1]")
    answer = dialect.answer(said, [entry, refusal, entry], [NEW, CONFLICTING], "r1")
    partial = json.loads(answer.body)["partialSuccess"]
    assert (answer.status, partial["rejectedLogRecords"]) == (200, "2")
    assert "late logRecords[1]: too old" in partial["errorMessage"]
