"""The registry adapter on confluent-kafka's own client and its registry inside the process."""

from __future__ import annotations

import uuid

import pytest

from rollwire.schemas.codec import schema_for
from rollwire.schemas.errors import RegistryUnavailable
from rollwire.schemas.framing import confluent_id
from rollwire.schemas.golden import load_examples
from rollwire.streams.seams.registry_confluent import ConfluentRegistry

REWARDS = schema_for(type(load_examples("rewards")[0].event)).text
ROLLOUTS = schema_for(type(load_examples("rollouts")[0].event)).text


def test_a_schema_is_registered_once_and_found_by_its_id() -> None:
    registry = ConfluentRegistry(f"mock://{uuid.uuid4()}", "p.")
    head = registry.head("rewards", REWARDS)
    assert len(head) == 5
    schema_id = confluent_id(head)
    assert schema_id is not None
    assert registry.schema_of(schema_id) == REWARDS
    assert registry.head("rewards", REWARDS) == head
    assert registry.head("rollouts", ROLLOUTS) != head
    assert registry._client.get_subjects() == ["p.rewards-value", "p.rollouts-value"]
    registry.close()


def test_an_unknown_id_is_no_schema() -> None:
    assert ConfluentRegistry(f"mock://{uuid.uuid4()}").schema_of(404) is None


def test_a_registry_that_is_not_there_is_named_in_time() -> None:
    registry = ConfluentRegistry("http://127.0.0.1:9")
    with pytest.raises(RegistryUnavailable, match=r"127\.0\.0\.1:9 did not give schema 1"):
        registry.schema_of(1)
    with pytest.raises(RegistryUnavailable, match=r"did not register a schema under rollwire\.rewards-value"):
        registry.head("rewards", REWARDS)
    registry.close()
