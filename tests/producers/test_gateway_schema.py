"""The gateway's OpenAPI document: what it says is what is answered, whatever is sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, CheckFunction
from schemathesis.core.parameters import ParameterLocation
from schemathesis.core.result import Ok

from rollwire.ops.gateway import run_gateway
from rollwire.producers.gateway.access import Caller, OpenAccess, Refusal
from rollwire.producers.gateway.config import GatewayConfig
from rollwire.producers.gateway.serve import make_app
from rollwire.streams.seams.keys_memory import MemoryKeys
from rollwire.streams.seams.log_memory import MemoryLog

START_S = 30.0
KEY = "Bearer rw_test_key"


class OneKey(OpenAccess):
    def identify(
        self, authorization: str | None, origin: str | None, address_key: str | None = None
    ) -> Caller | Refusal:
        if authorization != KEY:
            return Refusal(401, "key_unknown", "no such key")
        return super().identify(authorization, origin, address_key)


@pytest.fixture(scope="module")
def document() -> Iterator[schemathesis.BaseSchema]:
    config = GatewayConfig.model_validate({"port": 0})
    app = make_app(MemoryLog({"user-feedback": 4}), MemoryKeys(), b"s" * 32, config=config, access=OneKey())
    stop, ready = threading.Event(), threading.Event()
    urls: list[str] = []

    def listening(url: str) -> None:
        urls.append(url)
        ready.set()

    thread = threading.Thread(target=run_gateway, args=(app, config, stop), kwargs={"ready": listening})
    thread.start()
    try:
        assert ready.wait(START_S)
        yield schemathesis.openapi.from_url(f"{urls[0]}/openapi.json")
    finally:
        stop.set()
        thread.join(START_S)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_every_answer_is_as_the_document_says(
    document: schemathesis.BaseSchema, mode: GenerationMode
) -> None:
    operations = [found.ok() for found in document.get_all_operations() if isinstance(found, Ok)]
    assert {operation.path for operation in operations} >= {"/v1/feedback", "/v1/logs", "/metrics"}
    # Whoever sends more in the address than there is to say is not turned away for it; and whether a rollout is of our time,
    # a value in its signal's range, a schema cannot say.
    rejection, acceptance = (
        cast("CheckFunction", CHECKS.get_one(name))
        for name in ("negative_data_rejection", "positive_data_acceptance")
    )
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and operation.method != "post":
            continue  # a page takes nothing that could be wrong

        @given(operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=12,
            derandomize=True,
            deadline=None,
            phases=(Phase.generate,),
            suppress_health_check=[
                HealthCheck.too_slow,
                HealthCheck.filter_too_much,
                HealthCheck.data_too_large,
            ],
        )
        def check(case: schemathesis.Case[Any]) -> None:
            body = None if case.meta is None else case.meta.components.get(ParameterLocation.BODY)
            wrong = body is not None and body.mode is GenerationMode.NEGATIVE
            case.call_and_validate(
                headers={"authorization": KEY},
                excluded_checks=[acceptance] if wrong else [acceptance, rejection],
            )

        check()
