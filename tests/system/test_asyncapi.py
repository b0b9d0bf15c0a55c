"""AsyncAPI's own parser reads docs/asyncapi.json, and refuses one that is wrong. Needs Node.js and npm's registry."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from rollwire.ops.asyncapi.document import document_text
from rollwire.ops.asyncapi.parser import Verdict, check_document
from rollwire.ops.docs_topics import ASYNCAPI_TARGET
from rollwire.ops.stack.config import default_cache
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import EnvironmentMissing

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]


def checked(text: str) -> Verdict:
    try:
        return check_document(text, default_cache())
    except EnvironmentMissing as error:
        if os.environ.get("CI"):
            pytest.fail(f"THE ASYNCAPI DOCUMENT WAS NOT CHECKED: {error}")
        pytest.skip(f"THE ASYNCAPI DOCUMENT WAS NOT CHECKED: {error}")


def test_the_committed_document_is_valid_and_read_as_meant() -> None:
    verdict = checked(ASYNCAPI_TARGET.read_text("utf-8"))
    assert verdict.diagnostics == ()
    assert verdict.read is not None
    assert verdict.read.version == "3.1.0"
    assert set(verdict.read.channels) == set(TOPICS)
    assert len(verdict.read.messages) == sum(len(spec.schemas) for spec in TOPICS.values())
    assert len(verdict.read.operations) == sum(len(s.producers) + len(s.consumers) for s in TOPICS.values())


def test_the_document_with_a_registry_is_valid() -> None:
    assert checked(document_text(registry_url="http://127.0.0.1:8081")).diagnostics == ()


def _no_such_type(document: dict[str, Any]) -> None:
    document["components"]["messages"]["rewards-v1"]["payload"]["schema"]["fields"][0]["type"] = "strin"


def _binding_of_another_type(document: dict[str, Any]) -> None:
    document["channels"]["rewards"]["bindings"]["kafka"]["partitions"] = "four"


def _channel_that_is_not_there(document: dict[str, Any]) -> None:
    document["operations"]["producers-verifier-sends-rewards"]["channel"]["$ref"] = "#/channels/reward"


@pytest.mark.parametrize("damage", [_no_such_type, _binding_of_another_type, _channel_that_is_not_there])
def test_a_wrong_document_is_refused(damage: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(document_text())
    damage(document)
    verdict = checked(json.dumps(document))
    assert verdict.read is None
    assert any(one.severity == "error" for one in verdict.diagnostics)
