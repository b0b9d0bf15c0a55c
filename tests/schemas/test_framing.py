"""Both framings are read, told apart by the first byte; Confluent's is written where a registry is set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.codec import decode, encode, schema_for, use_registry
from rollwire.schemas.errors import Refused, RegistryUnavailable
from rollwire.schemas.framing import CONFLUENT_BYTES, MARKER, PREFIX_BYTES, confluent_id
from rollwire.schemas.golden import Example, all_examples, load_examples

US = 1_767_225_600_000_000
EXAMPLES = all_examples()


class Registry:
    """Ids by order of registration; counts what it is asked."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.asked = 0
        self.away = False

    def head(self, topic: str, schema: str) -> bytes:
        if self.away:
            raise RegistryUnavailable("away")
        if schema not in self.texts:
            self.texts.append(schema)
        return b"\x00" + self.texts.index(schema).to_bytes(4, "big")

    def schema_of(self, schema_id: int) -> str | None:
        self.asked += 1
        if self.away:
            raise RegistryUnavailable("away")
        return self.texts[schema_id] if schema_id < len(self.texts) else None


@pytest.fixture
def registry() -> Iterator[Registry]:
    made = Registry()
    use_registry(made)
    yield made
    assert use_registry(None) is made


@pytest.mark.parametrize("example", EXAMPLES, ids=[f"{e.topic}/{e.name}" for e in EXAMPLES])
def test_every_event_goes_through_both_framings(example: Example, registry: Registry) -> None:
    written = encode(example.event, source="test", time_us=US)
    assert confluent_id(written.value) is not None
    if example.version == TOPICS[example.topic].current.version:
        assert written.value[CONFLUENT_BYTES:] == example.value[PREFIX_BYTES:]
    assert decode(written.topic, written.value, written.headers, written.key) == example.event
    assert decode(example.topic, example.value, example.headers, example.key) == example.event


def test_an_id_is_asked_for_once(registry: Registry) -> None:
    written = encode(load_examples("rewards")[0].event, source="test", time_us=US)
    for _ in range(3):
        decode(written.topic, written.value, written.headers)
    assert registry.asked == 1


def test_trailing_and_missing_bytes_are_refused_in_this_framing_too(registry: Registry) -> None:
    written = encode(load_examples("rewards")[0].event, source="test", time_us=US)
    for value, reason in (
        (written.value + b"JUNK", "trailing_bytes"),
        (written.value[:-1], "malformed"),
        (written.value[:CONFLUENT_BYTES], "malformed"),
        (written.value[: CONFLUENT_BYTES - 1], "not_framed"),
    ):
        with pytest.raises(Refused) as caught:
            decode(written.topic, value, written.headers)
        assert caught.value.reason == reason


def test_an_event_of_another_topic_is_refused(registry: Registry) -> None:
    written = encode(load_examples("rewards")[0].event, source="test", time_us=US)
    with pytest.raises(Refused, match="a rewards event on rollouts"):
        decode("rollouts", written.value, written.headers)


@pytest.mark.parametrize(
    "text",
    [
        '{"type":"record","name":"N","fields":[{"name":"n","type":["null","N"]}]}',  # recursive, C56
        '"string"',
        "5",
        "{}",
        "no JSON",
        "[" * 100_000,
    ],
)
def test_what_is_no_released_schema_is_never_decoded_with(registry: Registry, text: str) -> None:
    registry.texts.append(text)
    with pytest.raises(Refused) as caught:
        decode("rewards", b"\x00\x00\x00\x00\x00" + b"\x02" * 5_000 + b"\x00", ())
    assert caught.value.reason == "unknown_schema"


def test_an_id_that_nobody_knows_is_refused(registry: Registry) -> None:
    with pytest.raises(Refused, match="no Avro schema with id 7"):
        decode("rewards", b"\x00\x00\x00\x00\x07rest", ())


def test_without_a_registry_the_other_framing_is_refused_with_its_reason() -> None:
    with pytest.raises(Refused, match="schema id 7, and no schema registry is set"):
        decode("rewards", b"\x00\x00\x00\x00\x07rest", ())


def test_an_absent_registry_refuses_no_event(registry: Registry) -> None:
    """A registry's outage is no fault of the event: it must not end in `dead-letters`."""
    event = load_examples("rewards")[0].event
    written = encode(event, source="test", time_us=US)
    registry.away = True
    with pytest.raises(RegistryUnavailable):
        decode(written.topic, written.value, written.headers)
    with pytest.raises(RegistryUnavailable):
        encode(event, source="test", time_us=US)
    registry.away = False
    assert decode(written.topic, written.value, written.headers) == event


def test_a_registry_gets_the_schema_with_its_documentation(registry: Registry) -> None:
    event = load_examples("rewards")[0].event
    encode(event, source="test", time_us=US)
    assert registry.texts == [schema_for(type(event)).text]
    assert '"doc"' in registry.texts[0]


def test_the_framings_cannot_be_taken_for_one_another() -> None:
    assert MARKER[0] != 0
    assert {e.value[:1] for e in EXAMPLES} == {MARKER[:1]}
    assert {e.topic for e in EXAMPLES} == set(TOPICS)
