"""A record that is acknowledged without an offset proves nothing: it is never taken for written (law 2)."""

from __future__ import annotations

import uuid

import pytest
from confluent_kafka import KafkaError, Message

from rollwire.ops.stack import StackInfo
from rollwire.ops.topics import apply_topics
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import LogUnavailable
from rollwire.streams.seams import log_kafka_write
from rollwire.streams.seams.log import Outgoing
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.log_kafka_write import Delivery
from rollwire.streams.seams.scan import scan


class Unplaced(Delivery):
    """Takes every second acknowledgement for one without an offset, as librdkafka gives it for a supposed repeat."""

    def report(self, error: KafkaError | None, message: Message) -> None:
        super().report(error, message)
        self.unplaced += self.done % 2


@pytest.mark.system
def test_records_without_an_offset_are_not_written(
    stack: StackInfo, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = KafkaLog(stack.bootstrap, prefix)
    records = [Outgoing("notices", b"k", b"%d" % n) for n in range(4)]
    plain = log.writer()
    before = plain._producer  # type: ignore[attr-defined]
    monkeypatch.setattr(log_kafka_write, "Delivery", Unplaced)
    with pytest.raises(LogUnavailable, match="2 of 4 records were acknowledged without an offset"):
        plain.write(records)
    assert plain._producer is not before  # type: ignore[attr-defined]
    writer = log.transactional_writer(f"{prefix}unplaced")
    writer.begin()
    writer.write([Outgoing("train-steps", b"k", b"%d" % n) for n in range(4)])
    with pytest.raises(LogUnavailable, match=r"without an offset.*the transaction is aborted"):
        writer.commit("", {})
    monkeypatch.undo()
    assert list(scan(log, ["train-steps"])) == []
    plain.write(records)
    assert len(list(scan(log, ["notices"]))) == 8
    plain.close()
    writer.close()
    log.close()


@pytest.mark.system
def test_whoever_writes_to_topics_that_were_just_made_finds_leaders(stack: StackInfo) -> None:
    """Without them a first batch is turned away while the next is taken, and is then acknowledged as a repeat."""
    some = {name: TOPICS[name] for name in ("notices", "rewards")}
    for _ in range(4):
        prefix = f"t{uuid.uuid4().hex[:12]}."
        apply_topics(stack.bootstrap, prefix, topics=some)
        log = KafkaLog(stack.bootstrap, prefix)
        writer = log.writer()
        for topic in some:
            writer.write([Outgoing(topic, b"k", b"x" * size, (), 0) for size in (1, 1, 1_000_000, 1)])
            assert [len(r.value or b"") for r in scan(log, [topic])] == [1, 1, 1_000_000, 1]
        writer.close()
        log.close()
