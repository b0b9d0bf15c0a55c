"""The closed set of codes that the gateway itself refuses with, beside those of keys (`access.AccessCode`) and of events
(`schemas.reasons.Reason`). Written once, here: the OpenAPI document and the tests follow from it.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

GatewayCode = Literal[
    # 400: the body, or one event of it
    "malformed",  # no JSON, no UTF-8, a lone surrogate, nested too deep
    "wrong_type",  # a field of another type, or null where a value belongs
    "missing_field",
    "unknown_field",
    "repeated_key",  # the same key twice in one object
    "text_invalid",  # a NUL or another control character in a text
    "not_an_evaluation",  # OTLP: a log record that is no gen_ai.evaluation.result
    "empty",  # a batch without events
    # 4xx: the request
    "not_found",  # 404
    "method_not_allowed",  # 405
    "timed_out",  # 408: the body did not arrive in time
    "too_large",  # 413: the body, what it inflates to, or one text
    "too_many",  # 413: events
    "encoding_invalid",  # 400: the body is not the gzip or zstd that its header says
    "encoding_unknown",  # 415
    "media_type_unknown",  # 415
    "quota_exceeded",  # 429
    # 5xx: nothing is wrong with the request
    "internal",  # 500
    "overloaded",  # 503: the queue is full; nothing was written
    "unavailable",  # 503: the broker or a key store does not answer; nothing was written
    "outcome_unknown",  # 503: not acknowledged in time; the same id again is harmless
    "stopping",  # 503
]

GATEWAY_CODES: Final[tuple[GatewayCode, ...]] = get_args(GatewayCode)
