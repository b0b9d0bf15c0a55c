"""Events to records of the log and back, through a log."""

from __future__ import annotations

import pytest

from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import Refused
from rollwire.schemas.golden import Example, all_examples, load_examples
from rollwire.streams.emit import decode_record, deletes, outgoing
from rollwire.streams.seams.log import Record
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan

EXAMPLES = all_examples()


@pytest.mark.parametrize("example", EXAMPLES, ids=[f"{e.topic}-{e.name}" for e in EXAMPLES])
def test_an_event_goes_through_the_log_as_it_is(example: Example) -> None:
    log = MemoryLog({name: spec.partitions for name, spec in TOPICS.items()})
    log.writer().write([outgoing(example.event, source="test", time_us=1_767_225_600_000_000)])
    (record,) = scan(log, [example.topic])
    assert decode_record(record) == example.event
    assert not deletes(record)


def test_a_record_without_a_key_is_refused() -> None:
    example = load_examples("rewards")[0]
    record = Record("rewards", 0, 0, 0, None, example.value, example.headers)
    with pytest.raises(Refused) as caught:
        decode_record(record)
    assert caught.value.reason == "key_mismatch"


@pytest.mark.parametrize(("topic", "compacted"), [("rewards", False), ("groups-closed", True)])
def test_a_null_value_is_no_event(topic: str, compacted: bool) -> None:
    record = Record(topic, 0, 0, 0, b"key", None, ())
    assert deletes(record) is compacted
    with pytest.raises(Refused) as caught:
        decode_record(record)
    assert caught.value.reason == "tombstone_not_allowed"
