"""Records decoded many at a time, for who reads whole topics: half the time of one after the other, and the same answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, groupby
from operator import attrgetter
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from rollwire.kernels.repack import Program, program_of, repack
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.codec import Schema, checked, schema_for
from rollwire.schemas.errors import Refused
from rollwire.schemas.framing import MARKER
from rollwire.schemas.limits import SCAN_ABOVE
from rollwire.schemas.records import Event, Rollout
from rollwire.schemas.validate import validate, validate_finite
from rollwire.schemas.validate_arrays import known_finite
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.log import Record

_FEW: Final = 8
"""So many records are decoded one by one: a call of compiled code would not pay."""

_HEAD: Final = 5  # an array's head in MessagePack, of any length


class _Bulk(NamedTuple):
    """What decodes a topic's current schema."""

    schema: Schema
    program: Program
    prefix: Any
    decoder: msgspec.msgpack.Decoder[list[Event]]


class BulkDecoder:
    """Of one thread: it keeps the memory that it works in."""

    def __init__(self) -> None:
        self._out = np.empty(1 << 20, np.uint8)

    def decode(self, records: Sequence[Record]) -> list[Event | Refused]:
        """Of each record its event, or why there is none; as `emit.decode_record`, to the last detail.

        Bodies under older schemas, in Confluent's wire format, above 64 KiB, or odd in any way go by `decode_record`.
        """
        found: list[Event | Refused] = []
        for topic, run in groupby(records, _topic):
            some = list(run)
            bulk = _bulk_of(topic) if len(some) > _FEW else None
            found += map(_single, some) if bulk is None else self._run(bulk, some)
        return found

    def _run(self, bulk: _Bulk, records: Sequence[Record]) -> list[Event | Refused]:
        values = [record.value or b"" for record in records]
        sizes = [len(value) for value in values]
        if max(sizes) > SCAN_ABOVE:
            return list(map(_single, records))
        at_K1 = np.fromiter(accumulate(sizes, initial=0), np.int64, len(sizes) + 1)
        data, good_K = np.frombuffer(b"".join(values), np.uint8), np.empty(len(sizes), np.uint8)
        while (size := repack(bulk.program, bulk.prefix, data, at_K1, self._out[_HEAD:], good_K)) < 0:
            self._out = np.empty(2 * self._out.size, np.uint8)
        good = good_K.tolist()
        self._out[:_HEAD] = np.frombuffer(b"\xdd" + sum(good).to_bytes(4, "big"), np.uint8)
        try:
            decoded = bulk.decoder.decode(self._out[: _HEAD + size].data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return list(map(_single, records))
        schema, events, meaning = bulk.schema, iter(decoded), _meaning(decoded)
        found: list[Event | Refused] = []
        for record, fine in zip(records, good, strict=True):
            if not fine:
                found.append(_single(record))
                continue
            try:
                found.append(checked(next(events), schema, record.headers, record.key or b"", meaning))
            except Refused as refused:
                found.append(refused)
        return found


_topic = attrgetter("topic")
_logprobs = attrgetter("logprobs")


def _meaning(events: Sequence[Event]) -> Callable[[Any], None]:
    """What checks each of them: one look at all logprobs costs what one look at those of each does."""
    known = bool(events) and isinstance(events[0], Rollout) and known_finite(list(map(_logprobs, events)))
    return validate_finite if known else validate


def _single(record: Record) -> Event | Refused:
    try:
        return decode_record(record)
    except Refused as refused:
        return refused


@cache
def _bulk_of(topic: str) -> _Bulk | None:
    """None: the topic's events are read one by one."""
    if topic not in TOPICS:
        return None
    record_class = TOPICS[topic].record_class
    schema = schema_for(record_class)
    program = program_of(json.loads(schema.text)) if schema.read is not None else None
    # A value of more than a topic takes is refused by whoever reads it singly.
    if program is None or schema.most <= SCAN_ABOVE:
        return None
    prefix = np.frombuffer(MARKER + schema.fingerprint, np.uint8)
    return _Bulk(schema, program, prefix, msgspec.msgpack.Decoder(list[record_class]))  # type: ignore[valid-type]
