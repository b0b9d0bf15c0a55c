"""The codec: what it writes is golden, what it refuses has a reason, CloudEvents' own library agrees on the headers."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
import pytest
from cloudevents.core.bindings.kafka import KafkaMessage, from_binary
from cloudevents.core.formats.json import JSONFormat

from rollwire.schemas import codec
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.codec import decode, encode, is_delete, schema_for
from rollwire.schemas.errors import Refused
from rollwire.schemas.field_types import compile_check
from rollwire.schemas.framing import MARKER, PREFIX_BYTES
from rollwire.schemas.golden import Example, all_examples, load_examples
from rollwire.schemas.records import Event, GroupClosed, Reward, Rollout, Span, TrainStep

EXAMPLES = all_examples()
NAMES = [f"{e.topic}-{e.name}" for e in EXAMPLES]
TIME_US = 1_767_225_603_000_000
SOURCE = "rollwire/examples"


def an_example(topic: str) -> Example:
    return load_examples(topic)[0]


def refused(example: Example, **changes: Any) -> Refused:
    """Decodes an example with some of its parts changed, which must be refused."""
    parts = {"topic": example.topic, "value": example.value, "headers": example.headers, "key": example.key}
    with pytest.raises(Refused) as caught:
        decode(**{**parts, **changes})
    return caught.value


def as_written(value: Any, written: Any) -> Any:
    """A value without the fields that what was written does not have, on all levels."""
    if isinstance(value, dict) and isinstance(written, dict):
        return {name: as_written(value[name], written[name]) for name in written}
    if isinstance(value, list) and isinstance(written, list) and len(value) == len(written):
        return [as_written(one, other) for one, other in zip(value, written, strict=True)]
    return value


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_examples_decode_to_their_events(example: Example) -> None:
    assert decode(example.topic, example.value, example.headers, example.key) == example.event
    plain = json.loads(msgspec.json.encode(example.event))
    if example.version != TOPICS[example.topic].current.version:
        plain = as_written(plain, example.plain)  # what came later has its default
    assert plain == example.plain  # the file has no field that the record lacks


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_events_encode_to_the_golden_bytes(example: Example) -> None:
    if example.version != TOPICS[example.topic].current.version:
        pytest.skip("written under an older schema")
    encoded = encode(example.event, source=SOURCE, time_us=TIME_US)
    assert encoded.topic == example.topic
    assert encoded.key == example.key
    assert encoded.value == example.value
    assert encoded.headers == example.headers


def test_every_topic_has_an_example() -> None:
    assert {e.topic for e in EXAMPLES} == set(TOPICS)


def test_a_plan_goes_to_the_partition_of_its_rank() -> None:
    event = an_example("packed-batches").event
    encoded = encode(msgspec.structs.replace(event, rank=3, ranks=4), source=SOURCE, time_us=TIME_US)
    assert encoded.partition == 3
    assert encode(an_example("rollouts").event, source=SOURCE, time_us=TIME_US).partition is None


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_the_cloudevents_library_reads_the_headers(example: Example) -> None:
    headers = {name: value for name, value in example.headers if value is not None}
    event = from_binary(KafkaMessage(headers, example.key, example.value), JSONFormat())
    assert event.get_id() == dict(example.headers)["ce_id"].decode()  # type: ignore[union-attr]
    assert event.get_type() == f"rollwire.{example.topic}.v{example.version}"
    assert event.get_source() == SOURCE
    assert event.get_specversion() == "1.0"
    assert event.get_datacontenttype() == "application/avro"
    assert event.get_time() == datetime.fromtimestamp(TIME_US / 1e6, tz=UTC)


# --- C44, C59: not an event at all -----------------------------------------------------------------------------------


@pytest.mark.parametrize("topic", TOPICS)
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "tombstone_not_allowed"),
        (b"", "not_framed"),
        (b"hello", "not_framed"),
        (b"\x00" * 1_000_000, "unknown_schema"),
        (MARKER, "not_framed"),
        (MARKER + b"\x00" * 8 + b"body", "unknown_schema"),
    ],
)
def test_c44_foreign_bytes_are_refused(topic: str, value: bytes | None, reason: str) -> None:
    assert refused(an_example(topic), value=value).reason == reason


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_c44_c59_an_event_of_another_topic_is_refused(example: Example) -> None:
    other = "rewards" if example.topic != "rewards" else "rollouts"
    assert refused(example, topic=other).reason == "wrong_schema"
    assert refused(example, topic="nowhere").reason == "wrong_schema"


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_c59_trailing_and_missing_bytes_are_refused(example: Example) -> None:
    assert refused(example, value=example.value + b"JUNK").reason == "trailing_bytes"
    for end in range(PREFIX_BYTES, len(example.value)):
        assert refused(example, value=example.value[:end]).reason == "malformed"


def test_c44_a_null_value_deletes_on_compacted_topics_only() -> None:
    assert {t for t in TOPICS if is_delete(t, None)} == {
        "fleet-status",
        "groups-closed",
        "production-groups-closed",
    }
    assert not is_delete("fleet-status", b"")
    assert not is_delete("nowhere", None)


def test_c42_a_value_over_the_topics_limit_is_refused_before_it_is_looked_at() -> None:
    big = b"\xff" * (TOPICS["rewards"].max_value_bytes + 1)
    assert refused(an_example("rewards"), value=big).reason == "too_large"
    # Nine MiB is over every source's limit, and a dead letter may still hold it.
    assert TOPICS["dead-letters"].max_value_bytes > max(
        spec.max_message_bytes for name, spec in TOPICS.items() if name != "dead-letters"
    )


# --- headers and key ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["ce_specversion", "ce_type", "ce_source", "ce_id", "ce_time", "content-type"]
)
@pytest.mark.parametrize("content", [b"other", b"", None, b"\xff\xfe", "missing", "twice"])
def test_headers_must_be_there_and_agree(name: str, content: bytes | str | None) -> None:
    example = an_example("rewards")
    headers: tuple[tuple[str, bytes | None], ...]
    if content == "missing":
        headers = tuple(h for h in example.headers if h[0] != name)
    elif content == "twice":
        headers = (*example.headers, *(h for h in example.headers if h[0] == name))
    else:
        assert not isinstance(content, str)
        headers = tuple((n, content if n == name else v) for n, v in example.headers)
    if name == "ce_source" and content in (b"other", b"\xff\xfe"):
        decode(example.topic, example.value, headers, example.key)  # any source may write
    else:
        assert refused(example, headers=headers).reason == "header_mismatch"


def test_a_time_without_a_zone_is_refused_and_foreign_headers_pass() -> None:
    example = an_example("rewards")
    headers = tuple((n, b"2026-01-01T00:00:03" if n == "ce_time" else v) for n, v in example.headers)
    assert refused(example, headers=headers).reason == "header_mismatch"
    traced = (*example.headers, ("traceparent", b"00-1-2-01"), ("traceparent", None))
    assert decode(example.topic, example.value, traced, example.key) == example.event


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_the_key_must_be_the_events(example: Example) -> None:
    assert refused(example, key=b"other").reason == "key_mismatch"
    assert refused(example, key=b"").reason == "key_mismatch"
    assert decode(example.topic, example.value, example.headers) == example.event


# --- C58, C62: encode refuses what is not of its declared type ------------------------------------------------------------


@pytest.mark.parametrize(
    ("topic", "changes"),
    [
        ("rewards", {"reward": 1}),  # an int where a float belongs
        ("rewards", {"reward": True}),
        ("rewards", {"reward": 2**53 + 1}),
        ("rewards", {"reward": np.float64(1.0)}),
        ("rewards", {"reward": "1.0"}),
        ("rewards", {"scored_us": 3.7}),
        ("rewards", {"scored_us": 1.767e15}),
        ("rewards", {"scored_us": np.int64(TIME_US)}),
        ("rewards", {"outcome": None}),
        ("rewards", {"outcome": b"right"}),
        ("rewards", {"outcome": "\ud800"}),  # a lone surrogate has no UTF-8
        ("rewards", {"evidence": "abc"}),
        ("rewards", {"source": "oracle"}),  # no symbol of the enum
        ("rewards", {"components": ({"name": "a", "valu": 1.0},)}),
        ("rollouts", {"index": True}),
        ("rollouts", {"seed": 2**63}),
        ("rollouts", {"seed": -(2**63) - 1}),
        ("rollouts", {"temperature": 1}),
        ("rollouts", {"logprobs": [0.0]}),
        ("rollouts", {"spans": (Span(version=1.0, start=0, end=4),)}),  # type: ignore[arg-type]
        ("rollouts", {"token_ids": "AAAA"}),
        ("train-steps", {"settings": {"threads": 1}}),
    ],
)
def test_c58_a_value_of_another_type_is_refused(topic: str, changes: dict[str, Any]) -> None:
    event = msgspec.structs.replace(an_example(topic).event, **changes)
    with pytest.raises(Refused) as caught:
        encode(event, source=SOURCE, time_us=TIME_US)
    assert caught.value.reason == "malformed"


class Misspelt(Reward, frozen=True, kw_only=True, gc=False):
    """What a typo makes of a reward: the field that counts is gone, another one is there."""

    rewrad: float


def test_c62_a_misspelt_field_is_named_and_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """C62: neither dropped, nor filled with null."""
    good = an_example("rewards").event
    fields = {name: getattr(good, name) for name in good.__struct_fields__}
    typo = Misspelt(**{**fields, "reward": None}, rewrad=1.0)
    schema = schema_for(Reward)
    kind: type[Event] = Misspelt
    monkeypatch.setitem(codec._BY_CLASS, kind, schema._replace(typed=compile_check(Misspelt)))
    with pytest.raises(Refused, match="rewrad") as caught:
        encode(typo, source=SOURCE, time_us=TIME_US)
    assert caught.value.reason == "malformed"


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63), 2**53 + 1, 0])
def test_c58_whole_numbers_are_exact(seed: int) -> None:
    event = msgspec.structs.replace(an_example("rollouts").event, seed=seed)
    encoded = encode(event, source=SOURCE, time_us=TIME_US)
    decoded = decode(encoded.topic, encoded.value, encoded.headers, encoded.key)
    assert isinstance(decoded, Rollout)
    assert decoded.seed == seed


def test_minus_zero_and_the_smallest_float_are_exact() -> None:
    for value in (-0.0, 5e-324, 1e308):
        event = msgspec.structs.replace(an_example("rewards").event, reward=value)
        encoded = encode(event, source=SOURCE, time_us=TIME_US)
        decoded = decode(encoded.topic, encoded.value, encoded.headers, encoded.key)
        assert isinstance(decoded, Reward)
        assert decoded.reward is not None
        assert math.copysign(1.0, decoded.reward) == math.copysign(1.0, value)
        assert decoded.reward == value


def test_a_diverging_step_is_recorded_as_measured() -> None:
    event = msgspec.structs.replace(an_example("train-steps").event, loss=math.nan, grad_norm=math.inf)
    encoded = encode(event, source=SOURCE, time_us=TIME_US)
    decoded = decode(encoded.topic, encoded.value, encoded.headers, encoded.key)
    assert isinstance(decoded, TrainStep)
    assert math.isnan(decoded.loss)
    assert math.isinf(decoded.grad_norm)


def test_c62_a_misspelled_field_does_not_vanish() -> None:
    with pytest.raises(TypeError, match="rewrad"):
        Reward(rewrad=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize("time_us", [1_700_000_000, 1_700_000_000_000, -1, 0, 1_700_000_000_000_000_000])
def test_c45_times_in_another_unit_are_refused(time_us: int) -> None:
    event = an_example("groups-closed").event
    assert isinstance(event, GroupClosed)
    for bad in (event, msgspec.structs.replace(event, closed_us=time_us)):
        with pytest.raises(Refused) as caught:
            encode(bad, source=SOURCE, time_us=time_us if bad is event else TIME_US)
        assert caught.value.reason == "time_invalid"


def test_a_source_is_demanded_and_a_part_is_no_event() -> None:
    with pytest.raises(Refused) as caught:
        encode(an_example("rewards").event, source="", time_us=TIME_US)
    assert caught.value.reason == "header_mismatch"
    with pytest.raises(Refused) as caught:
        encode(Span(version=0, start=0, end=1), source=SOURCE, time_us=TIME_US)
    assert caught.value.reason == "wrong_schema"


def test_c42_an_event_over_the_limit_is_not_written() -> None:
    event = msgspec.structs.replace(an_example("notices").event, text="x" * (8 * 1024 * 1024))
    with pytest.raises(Refused) as caught:
        encode(event, source=SOURCE, time_us=TIME_US)
    assert caught.value.reason == "too_large"
    event = msgspec.structs.replace(
        an_example("notices").event, attributes={str(i): "" for i in range(70_000)}
    )
    with pytest.raises(Refused) as caught:
        encode(event, source=SOURCE, time_us=TIME_US)
    assert caught.value.reason == "limit_exceeded"


def test_every_event_class_names_its_schema() -> None:
    for example in EXAMPLES:
        event: Event = example.event
        assert schema_for(type(event)).spec.name == example.topic
