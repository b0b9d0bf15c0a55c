"""OpenTelemetry's `gen_ai.evaluation.result`, as OTLP/HTTP logs in JSON: `POST /v1/logs`.

Sources: opentelemetry-proto `logs/v1/logs.proto` and the OTLP specification, "OTLP/HTTP" (JSON mapping: camelCase, 64-bit
integers as strings, partial success); semantic conventions for generative AI, event `gen_ai.evaluation.result`.

    gen_ai.evaluation.name          signal
    gen_ai.evaluation.score.value   value
    gen_ai.evaluation.score.label   label
    gen_ai.evaluation.explanation   comment
    gen_ai.response.id              rollout_id, unless rollwire.rollout_id says it
    rollwire.feedback_id, log.record.uid        feedback_id
    user.id, enduser.id             subject
    timeUnixNano                    happened_at

What this software does not know is passed over and of two equal members the last counts, as protobuf's JSON mapping has it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from rollwire.producers.gateway.access import Refusal
from rollwire.producers.gateway.answers import CONFLICT
from rollwire.producers.gateway.commit import CONFLICTING, Fate
from rollwire.producers.gateway.dialects.seam import Answer, Said
from rollwire.producers.gateway.item import Item, Parsed, refusal_of
from rollwire.producers.gateway.records import Entry

PATH: Final = "/v1/logs"
EVENT: Final = "gen_ai.evaluation.result"
_OBJECTS: Final = (
    24  # of one log record: itself, and two for each of its attributes; more are held only in a small batch
)
_INTEGER: Final = re.compile(r"-?[0-9]{1,20}")
_SHOWN: Final = 5  # refused records that the answer's message names
# google.rpc.Code of an HTTP status, as OTLP's error bodies carry it.
_RPC: Final = {400: 3, 401: 16, 403: 7, 408: 4, 413: 8, 415: 3, 429: 8, 500: 13, 503: 14}


class _Value(msgspec.Struct, rename="camel", gc=False, frozen=True):
    string_value: str | None = None
    bool_value: bool | None = None
    int_value: str | int | None = None
    double_value: float | None = None


class _Attribute(msgspec.Struct, gc=False):
    key: str
    value: _Value = _Value()


class _Record(msgspec.Struct, rename="camel", gc=False):
    time_unix_nano: str | int | None = None
    event_name: str | None = None
    attributes: list[_Attribute] = []


class _ScopeLogs(msgspec.Struct, rename="camel", gc=False):
    log_records: list[_Record] = []


class _ResourceLogs(msgspec.Struct, rename="camel", gc=False):
    scope_logs: list[_ScopeLogs] = []


class _Request(msgspec.Struct, rename="camel"):
    resource_logs: list[_ResourceLogs]


_REQUEST: Final = msgspec.json.Decoder(_Request)
_encode = msgspec.json.Encoder().encode


class OtelDialect:
    name = "otel"
    path = PATH

    def parse(self, body: bytes, media_type: str, max_items: int) -> Said | Refusal:
        if media_type != "application/json":
            return Refusal(415, "media_type_unknown", "OTLP/HTTP as application/json; protobuf is not taken")
        objects = body.count(b"{")
        if objects > _OBJECTS * max_items:
            return Refusal(413, "too_many", f"{objects} JSON objects in one request")
        try:
            request = _REQUEST.decode(body)
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            return refusal_of(error, body, "")
        records = sum(
            len(scope.log_records) for resource in request.resource_logs for scope in resource.scope_logs
        )
        if records > max_items:
            return Refusal(413, "too_many", f"{records} log records in one request; the limit is {max_items}")
        items = [
            _item(record, f"resourceLogs[{r}].scopeLogs[{s}].logRecords[{i}]")
            for r, resource in enumerate(request.resource_logs)
            for s, scope in enumerate(resource.scope_logs)
            for i, record in enumerate(scope.log_records)
        ]
        return Said(items, True) if items else Refusal(400, "empty", "no log records", "resourceLogs")

    def answer(
        self, said: Said, results: Sequence[Entry | Refusal], fates: Sequence[Fate], request_id: str
    ) -> Answer:
        refused = [result for result in results if isinstance(result, Refusal)]
        refused += [CONFLICT] * sum(fate == CONFLICTING for fate in fates)
        if not refused:
            return Answer(200, b"{}")
        message = "; ".join(f"{one.code} {one.field}: {one.detail}" for one in refused[:_SHOWN])
        # int64 is a string in protobuf's JSON.
        partial = {"rejectedLogRecords": str(len(refused)), "errorMessage": message}
        return Answer(200, _encode({"partialSuccess": partial}))

    def problem(self, refusal: Refusal, request_id: str) -> Answer:
        """`google.rpc.Status`, as OTLP demands of errors."""
        status = {
            "code": _RPC.get(refusal.status, 2),
            "message": f"{refusal.code} {refusal.field}: {refusal.detail} (request {request_id})",
        }
        return Answer(
            refusal.status,
            _encode(status),
            retry_after_s=refusal.retry_after_s,
            close=refusal.status in (408, 413),
        )


def _item(record: _Record, field: str) -> Parsed:
    attributes: dict[str, Any] = {}
    for attribute in record.attributes:
        if attribute.key in attributes:
            return Refusal(400, "repeated_key", f"attribute {attribute.key[:80]!r} stands there twice", field)
        attributes[attribute.key] = _plain(attribute.value)
    name = record.event_name or attributes.get("event.name")
    if name != EVENT:
        return Refusal(400, "not_an_evaluation", f"a log record that is no {EVENT}", field)
    said: dict[str, Any] = {
        "rollout_id": attributes.get("rollwire.rollout_id", attributes.get("gen_ai.response.id")),
        "signal": attributes.get("gen_ai.evaluation.name"),
        "label": attributes.get("gen_ai.evaluation.score.label"),
        "comment": attributes.get("gen_ai.evaluation.explanation"),
        "feedback_id": attributes.get("rollwire.feedback_id", attributes.get("log.record.uid")),
        "subject": attributes.get("user.id", attributes.get("enduser.id")),
    }
    for key, attribute_names in (
        ("rollout_id", "gen_ai.response.id or rollwire.rollout_id"),
        ("signal", "gen_ai.evaluation.name"),
    ):
        if said[key] is None:
            return Refusal(400, "missing_field", f"attribute {attribute_names} is missing", field)
    for key, value in said.items():
        if value is not None and not isinstance(value, str):
            return Refusal(400, "wrong_type", f"{key} must be a string attribute", field)
    value = attributes.get("gen_ai.evaluation.score.value", UNSET)
    if not isinstance(value, float | bool | UnsetType):
        return Refusal(400, "wrong_type", "gen_ai.evaluation.score.value must be a number", field)
    nanos = _integer(record.time_unix_nano or 0)
    if nanos is None:
        return Refusal(400, "time_invalid", "timeUnixNano is no integer of 64 bits", field)
    seconds = nanos / 1e9
    return Item(**said, value=value, happened_at=seconds or UNSET)


def _plain(value: _Value) -> str | bool | float | None:
    """None for what is no scalar, or several at once."""
    said = (value.string_value, value.bool_value, value.int_value, value.double_value)
    if sum(one is not None for one in said) != 1:
        return None
    if value.int_value is not None:
        integer = _integer(value.int_value)
        return None if integer is None else float(integer)
    return (
        value.string_value
        if value.string_value is not None
        else (value.bool_value if value.bool_value is not None else value.double_value)
    )


def _integer(said: str | int) -> int | None:
    """64 bits, as protobuf's JSON writes them: a string or a number. Python's own reading takes blanks, "1_0" and digits of all scripts."""
    if isinstance(said, str):
        if _INTEGER.fullmatch(said) is None:
            return None
        said = int(said)
    return said if -(1 << 63) <= said < 1 << 64 else None
