"""Many records decoded at once give what each of them alone gives: the same events, and the same refusals in the same words."""

from __future__ import annotations

import io
import json
import random
import re
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import pytest
from fastavro import schemaless_writer

from rollwire.kernels.repack import program_of
from rollwire.ops.bench.events import sample_events
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.codec import encode, schema_for
from rollwire.schemas.errors import Refused
from rollwire.schemas.framing import MARKER, PREFIX_BYTES
from rollwire.schemas.golden import all_examples
from rollwire.schemas.records import Event
from rollwire.streams.bulk import BulkDecoder
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.log import Record

_US: Final = 1_767_225_600_000_000


def record_of(event: Event, offset: int = 0) -> Record:
    e = encode(event, source="rollwire/test", time_us=_US)
    return Record(e.topic, 0, offset, _US // 1_000, e.key, e.value, e.headers)


def alone(record: Record) -> Event | Refused:
    try:
        return decode_record(record)
    except Refused as refused:
        return refused


def said(outcome: Event | Refused) -> object:
    """For comparison: NaN equals itself, and a refusal is its words."""
    if isinstance(outcome, Refused):
        return outcome.reason, re.sub(r" at 0x[0-9a-f]+", "", outcome.detail)
    return type(outcome), msgspec.msgpack.encode(outcome)


def same(records: Sequence[Record]) -> list[Event | Refused]:
    together = BulkDecoder().decode(records)
    assert [said(outcome) for outcome in together] == [said(alone(record)) for record in records]
    return together


def examples() -> list[Record]:
    return [record_of(event) for event in sample_events(3).values()] + [
        Record(e.topic, 0, 0, 0, e.key, e.value, tuple(e.headers)) for e in all_examples()
    ]


@pytest.mark.parametrize("topic", sorted(TOPICS))
def test_events_of_every_topic_are_the_same_many_at_once(topic: str) -> None:
    mine = [record for record in examples() if record.topic == topic]
    outcomes = same([mine[n % len(mine)]._replace(offset=n) for n in range(40)])
    assert not any(isinstance(outcome, Refused) for outcome in outcomes)


@pytest.mark.parametrize("topic", sorted(TOPICS))
def test_every_topic_is_read_by_the_compiled_machine(topic: str) -> None:
    assert program_of(json.loads(schema_for(TOPICS[topic].record_class).text)) is not None


def test_damaged_values_are_refused_in_the_same_words() -> None:
    rng = random.Random(7)
    for original in examples():
        value = original.value or b""
        if len(value) > 20_000:
            continue
        damaged: list[Record] = []
        for _ in range(40):
            data = bytearray(value)
            match rng.randrange(5):
                case 0:
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                case 1:
                    del data[rng.randrange(len(data)) :]
                case 2:
                    at = rng.randrange(PREFIX_BYTES, len(data) + 1)
                    data[at:at] = rng.randbytes(rng.randrange(1, 12))
                case 3:
                    at = rng.randrange(PREFIX_BYTES, len(data))
                    data[at : at + 1] = bytes(
                        [0x80 | data[at], *(0x80,) * rng.randrange(10), rng.randrange(3)]
                    )
                case _:
                    data[rng.randrange(len(data))] = rng.choice((0x00, 0x01, 0x7F, 0x80, 0xFF))
            damaged.append(original._replace(value=bytes(data)))
        # Good ones between the damaged: each has its own outcome.
        mixed = [record for pair in zip(damaged, [original] * len(damaged), strict=True) for record in pair]
        outcomes = same(mixed)
        assert all(isinstance(outcome, Event) for outcome in outcomes[1::2])


def test_a_batch_of_several_topics_keeps_its_order_and_what_is_no_event_its_place() -> None:
    kinds = [record for record in examples() if len(record.value or b"") < 20_000]
    rng = random.Random(1)
    batch = [record for _ in range(20) for record in [rng.choice(kinds)] * rng.randrange(1, 30)]
    batch[3] = batch[3]._replace(value=None)
    batch[60] = batch[60]._replace(key=None)
    batch[100] = batch[100]._replace(headers=())
    batch[140] = batch[140]._replace(topic="unheard-of")
    outcomes = same(batch)
    assert isinstance(outcomes[3], Refused)


def test_text_that_is_no_utf8_spoils_nothing_but_its_own_record() -> None:
    rollout = record_of(sample_events(5)["rollout"])
    value = rollout.value or b""
    bad = rollout._replace(value=value.replace(b"countdown", b"countdo\xff\xff"))
    assert bad.value != value
    outcomes = same([rollout] * 20 + [bad] + [rollout] * 20)
    assert [isinstance(o, Refused) for o in outcomes] == [False] * 20 + [True] + [False] * 20


def test_numbers_of_every_length_come_out_right() -> None:
    schema = schema_for(type(sample_events(0)["rollout"]))
    rollout = sample_events(0)["rollout"]
    seeds = [sign * ((1 << bits) + off) for bits in range(63) for off in (-1, 0, 1) for sign in (1, -1)]
    records: list[Record] = []
    for seed in seeds:
        plain = msgspec.to_builtins(rollout, builtin_types=(bytes,)) | {"seed": seed}
        out = io.BytesIO()
        schemaless_writer(out, schema.avro, plain)
        records.append(record_of(rollout)._replace(value=MARKER + schema.fingerprint + out.getvalue()))
    assert [getattr(outcome, "seed", None) for outcome in same(records)] == seeds


def test_memory_grows_where_a_batch_is_large() -> None:
    rng = np.random.default_rng(0)
    rollout = sample_events(0)["rollout"]
    outcome_of = msgspec.structs.replace(rollout, outcome="x" * 150)
    records = [record_of(outcome_of, n) for n in rng.permutation(6_000).tolist()]
    assert not any(isinstance(outcome, Refused) for outcome in same(records))
