"""What the monitor holds in memory: the page, and how far each partition was folded. Thread-confined, no I/O."""

from __future__ import annotations

from collections.abc import Mapping

from rollwire.schemas.errors import Refused
from rollwire.streams.emit import decode_record
from rollwire.streams.monitor.page import Page, fold, with_rates
from rollwire.streams.seams.log import Record, TopicPartition


class MonitorState:
    """Folds each record once: delivery is at least once, counting is not idempotent."""

    def __init__(self) -> None:
        self.page = Page()
        self.skipped = 0  # records that did not decode
        self._next: dict[TopicPartition, int] = {}
        self._ends: dict[str, int] = {}
        self._ends_at_us = 0

    def take(self, record: Record, now_us: int) -> None:
        """Folds a record of a topic that the page shows. What does not decode is skipped: whoever acts on the topic
        refuses it, and its dead letter is counted."""
        partition = TopicPartition(record.topic, record.partition)
        if record.offset < self._next.get(partition, 0):
            return
        self._next[partition] = record.offset + 1
        try:
            event = decode_record(record)
        except Refused:
            self.skipped += 1
            return
        self.page = fold(self.page, event, now_us)

    def sample(self, ends: Mapping[TopicPartition, int], now_us: int) -> None:
        """Takes end offsets of all topics."""
        sums: dict[str, int] = {}
        for partition, end in ends.items():
            sums[partition.topic] = sums.get(partition.topic, 0) + end
        if self._ends_at_us:
            self.page = with_rates(self.page, self._ends, sums, (now_us - self._ends_at_us) / 1e6, now_us)
        self._ends, self._ends_at_us = sums, now_us
