"""The OpenAPI 3.1 document of the gateway: built from the same limits and codes that it answers with."""

from __future__ import annotations

from typing import Any, Final, get_args

import msgspec

from rollwire.producers.gateway.access import AccessCode
from rollwire.producers.gateway.codes import GATEWAY_CODES
from rollwire.producers.gateway.config import GatewayConfig
from rollwire.producers.gateway.judge import MAX_NAME
from rollwire.schemas.reasons import REASONS
from rollwire.schemas.rules import Rules

_ROLLOUT_ID: Final = (
    "^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}\\.(0|[1-9][0-9]{0,5})$"
)
_FEEDBACK_ID: Final = "^[A-Za-z0-9._:-]{1,128}$"


def document(config: GatewayConfig, rules: Rules) -> bytes:
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Rollwire feedback gateway",
                "version": "1",
                "description": "An answer 2xx means that the log has it. Every answer carries `x-request-id`.",
            },
            "security": [{"key": []}, {"address_key": []}],
            "paths": {
                "/v1/feedback": {"post": _feedback()},
                "/v1/logs": {"post": _logs()},
                "/healthz": {"get": _page("healthz", "The process answers.", {"204": _plain("It does.")})},
                "/readyz": {
                    "get": _page(
                        "readyz",
                        "The broker answers.",
                        {"200": _json("It does.", {"type": "object"}), "503": _problem("It does not.")},
                    )
                },
                "/metrics": {
                    "get": _page(
                        "metrics",
                        "Prometheus exposition.",
                        {
                            "200": {
                                "description": "Metrics.",
                                "headers": _HEADERS,
                                "content": {"text/plain": {"schema": {"type": "string"}}},
                            },
                            "401": _problem("No key."),
                            "403": _problem("The key's scopes."),
                        },
                    )
                },
            },
            "components": {
                "securitySchemes": {
                    "key": {"type": "http", "scheme": "bearer", "description": "rw_<key id>_<secret>"},
                    "address_key": {
                        "type": "apiKey",
                        "in": "query",
                        "name": "key",
                        "description": "publishable keys only",
                    },
                },
                "schemas": _schemas(config, rules),
            },
        }
    )


_HEADERS: Final = {"x-request-id": {"schema": {"type": "string"}, "required": True}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _plain(text: str) -> dict[str, Any]:
    return {"description": text, "headers": _HEADERS}


def _json(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "headers": _HEADERS, "content": {"application/json": {"schema": schema}}}


def _problem(text: str, *, retry: bool = False) -> dict[str, Any]:
    headers: dict[str, Any] = dict(_HEADERS)
    if retry:
        headers["retry-after"] = {"schema": {"type": "integer", "minimum": 1}}
    return {
        "description": text,
        "headers": headers,
        "content": {"application/problem+json": {"schema": _ref("Problem")}},
    }


def _page(name: str, text: str, responses: dict[str, Any]) -> dict[str, Any]:
    return {"operationId": name, "summary": text, "security": [], "responses": responses}


def _refusals() -> dict[str, Any]:
    return {
        "400": _problem("The body, or a field of it; nothing was stored."),
        "401": _problem("No key, or none that is valid."),
        "403": _problem("The key's scopes or origins."),
        "408": _problem("The body did not arrive in time."),
        "413": _problem("Too many bytes or events."),
        "415": _problem("A media type or an encoding that is not taken."),
        "429": _problem("The key's quota.", retry=True),
        "500": _problem("A fault of the gateway."),
        "503": _problem("The log does not take it now, or did not say so in time: try again.", retry=True),
    }


def _feedback() -> dict[str, Any]:
    return {
        "operationId": "feedback",
        "summary": "One event (a JSON object), or a batch (a JSON array, or NDJSON).",
        "description": (
            "Bodies may be sent with Content-Encoding gzip or zstd. The answer to a batch has a word on every event, in order; "
            "the accepted ones are durable whatever became of the others."
        ),
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {
                        "oneOf": [_ref("Event"), {"type": "array", "items": _ref("Event"), "minItems": 1}]
                    }
                },
                "application/x-ndjson": {"schema": {"type": "string", "minLength": 1}},
            },
        },
        "responses": {
            "200": _json("Every event is in the log.", {"oneOf": [_ref("Taken"), _ref("Batch")]}),
            "207": _json("Of a batch: some events were refused.", _ref("Batch")),
            "409": _problem(
                "This id was acknowledged with other content; both are kept, the first one counts."
            ),
            **_refusals(),
            "400": _none_taken(),
        },
    }


def _none_taken() -> dict[str, Any]:
    answer = _problem("The body, or a field of it; of a batch: every event. Nothing was stored.")
    answer["content"]["application/json"] = {"schema": _ref("Batch")}
    return answer


def _logs() -> dict[str, Any]:
    any_object = {"type": "object"}
    refusals = {
        status: {**answer, "content": {"application/json": {"schema": any_object}}}
        for status, answer in _refusals().items()
    }
    return {
        "operationId": "logs",
        "summary": "OTLP/HTTP logs as JSON: each log record that is a gen_ai.evaluation.result is an event.",
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref("ExportLogsServiceRequest")}},
        },
        "responses": {
            "200": _json(
                "ExportLogsServiceResponse: `partialSuccess` says how many records were refused.", any_object
            ),
            **refusals,
        },
    }


def _schemas(config: GatewayConfig, rules: Rules) -> dict[str, Any]:
    text = {"type": ["string", "null"]}
    name = {**text, "minLength": 1, "maxLength": MAX_NAME, "pattern": "^[^\\u0000-\\u001f\\u007f]*$"}
    return {
        "Event": {
            "type": "object",
            "additionalProperties": False,
            "required": ["rollout_id", "signal"],
            "properties": {
                "feedback_id": {
                    **text,
                    "pattern": _FEEDBACK_ID,
                    "description": "Idempotency key. Without one it is derived from the content, and the answer says so.",
                },
                "rollout_id": {"type": "string", "pattern": _ROLLOUT_ID},
                "signal": {"type": "string", "enum": list(rules.signals)},
                "value": {
                    "type": ["number", "boolean"],
                    "description": "true and false for boolean signals only.",
                },
                "label": {**name, "description": "A word of the rules that stands for a value."},
                "comment": {
                    **text,
                    "minLength": 1,
                    "maxLength": config.max_comment_bytes,
                    "pattern": "^[^\\u0000]*$",
                    "description": "Free text, encrypted with the subject's key; needs `subject`.",
                },
                "subject": {**name, "description": "Who said it, as you call them. The log has a pseudonym."},
                "happened_at": {
                    "type": ["string", "number", "null"],
                    "description": "RFC 3339 with a zone (canonical), or seconds since 1970. Kept to the microsecond.",
                },
            },
        },
        "Taken": {
            "type": "object",
            "required": ["status", "feedback_id", "id_source", "repeated"],
            "properties": {
                "status": {"const": 200},
                "feedback_id": {"type": "string"},
                "id_source": {"enum": ["client", "content"]},
                "repeated": {
                    "type": "boolean",
                    "description": "It was in the log before; nothing was written.",
                },
                "request_id": {"type": "string"},
            },
        },
        "Refused": {
            "type": "object",
            "required": ["status", "code", "field", "detail"],
            "properties": {
                "status": {"type": "integer", "minimum": 400, "maximum": 499},
                "code": _ref("Code"),
                "field": {"type": "string", "description": "Path into the body; empty = the whole."},
                "detail": {"type": "string"},
                "feedback_id": {"type": "string"},
            },
        },
        "Batch": {
            "type": "object",
            "required": ["accepted", "refused", "request_id", "items"],
            "properties": {
                "accepted": {"type": "integer"},
                "refused": {"type": "integer"},
                "request_id": {"type": "string"},
                "items": {"type": "array", "items": {"oneOf": [_ref("Taken"), _ref("Refused")]}},
            },
        },
        "Problem": {
            "type": "object",
            "description": "RFC 9457.",
            "required": ["type", "title", "status", "code", "field", "detail", "request_id"],
            "properties": {
                "type": {"type": "string"},
                "title": {"type": "string"},
                "status": {"type": "integer"},
                "code": _ref("Code"),
                "field": {"type": "string"},
                "detail": {"type": "string"},
                "request_id": {"type": "string"},
            },
        },
        "Code": {"enum": [*GATEWAY_CODES, *get_args(AccessCode), *REASONS]},
        "ExportLogsServiceRequest": {
            "type": "object",
            "required": ["resourceLogs"],
            "properties": {"resourceLogs": {"type": "array", "items": {"type": "object"}, "minItems": 1}},
        },
    }
