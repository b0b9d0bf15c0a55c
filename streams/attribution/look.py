"""What attribution asks the log beside reading it: where idle topics end, and which rules hold. Runs in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from rollwire.schemas.errors import ConfigError, Refused, TopicMismatch
from rollwire.schemas.records import Notice
from rollwire.schemas.rules import parse_rules
from rollwire.schemas.rules.parse import default_text
from rollwire.streams.attribution.progress import Input, Progress
from rollwire.streams.attribution.rulebook import DELAY_US, Rulebook, rules_notice
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log, TopicPartition
from rollwire.streams.seams.scan import scan

NOTICES: Final = "notices"
_POLL_S: Final = 3.0  # between two readings of the notices: several fit into the rules' delay
_PROBE_S: Final = 1.0
_logger = structlog.get_logger("rollwire.attribution")


class End(NamedTuple):
    """An input that was found at rest: from `seen` to `position` stand no records, and it ends at `end`."""

    input: Input
    seen: int
    position: int
    end: int


class Found(NamedTuple):
    rulebook: Rulebook
    ends: tuple[End, ...]
    asked_us: int  # when the ends were asked for, the margin of the clocks taken off
    most_us: int  # no window is closed beyond this: the rules were read up to here


class Look:
    """`around` by one caller at a time, `nothing_between` and `rules_now` by any."""

    def __init__(self, log: Log, clock: Clock, skew_us: int) -> None:
        self._log = log
        self._clock = clock
        self._skew_us = skew_us
        self._noticed: dict[TopicPartition, int] = {}
        self._polled_us = 0
        self._before: dict[Input, int] = {}
        self._reading = threading.Lock()  # of notices: each is taken once, in order
        self.rulebook = Rulebook()

    def partitions(self, topics: Sequence[str]) -> int:
        """How many they have, all the same. Raises `TopicMismatch`."""
        counts = {topic: self._log.partitions(topic) for topic in topics}
        if len(set(counts.values())) != 1:
            raise TopicMismatch(f"topics that are joined differ in partitions: {counts}")
        return next(iter(counts.values()))

    def beginnings(self, inputs: Iterable[Input]) -> dict[Input, int]:
        asked = {TopicPartition(*input_): input_ for input_ in inputs}
        found = self._log.beginning_offsets(list(asked))
        return {input_: found[partition] for partition, input_ in asked.items()}

    def start_rules(self, path: Path | None, model: str) -> Rulebook:
        """The rules of the log; those of the file are written there first, if they are others than its newest. Without a file
        the newest hold on; where there are none, the built-in ones go in. Raises `ConfigError`, `LogError`."""
        try:
            text = None if path is None else path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"rules {path}: {error}") from error
        rules = None if text is None else parse_rules(text, str(path))
        self._read_notices()
        newest = self.rulebook.newest
        if newest is None or (rules is not None and rules.digest != newest.digest):
            notice = rules_notice(default_text() if text is None else text, model, self._clock.now_us())
            writer = self._log.writer()
            try:
                writer.write([outgoing(notice, source="rollwire/attribution", time_us=notice.at_us)])
            finally:
                writer.close()
            self._read_notices()
        return self.rulebook

    def rules_now(self) -> Rulebook:
        """What the log says now. Raises `LogError`."""
        self._read_notices()
        return self.rulebook

    def around(self, progress: Progress, due: Mapping[int, int], topics: Sequence[str]) -> Found:
        """`due`: by partition, when its first window is over. Raises `LogError`."""
        now_us = self._clock.now_us()
        if now_us - self._polled_us >= _POLL_S * 1e6:
            self._read_notices()
        asked_us = now_us - self._skew_us
        inputs = [
            Input(topic, partition)
            for partition, at in due.items()
            if progress.watermark_us(partition, topics) < at <= asked_us
            for topic in topics
        ]
        return Found(self.rulebook, self._ends(progress, inputs), asked_us, self._polled_us + DELAY_US)

    def _ends(self, progress: Progress, inputs: Sequence[Input]) -> tuple[End, ...]:
        if not inputs:
            return ()
        # What is written, decided or not: behind an open transaction stand records with times of long ago.
        written = self._log.written_offsets([TopicPartition(*input_) for input_ in inputs])
        found: list[End] = []
        before, self._before = self._before, {}
        for input_ in inputs:
            seen, end = progress.next_offset(input_), written[TopicPartition(*input_)]
            if seen is None:
                continue
            self._before[input_] = seen
            if seen >= end:
                found.append(End(input_, seen, seen, end))
            elif (
                before.get(input_) == seen
            ):  # nothing was read since the last time: is there anything to read?
                found.append(End(input_, seen, self._probe(input_, seen, end), end))
        return tuple(found)

    def nothing_between(self, input_: Input, start: int, offset: int) -> bool:
        """Whether no record stands from `start` up to `offset`. Raises `LogError`."""
        return self._probe(input_, start, offset) >= offset

    def _probe(self, input_: Input, seen: int, end: int) -> int:
        """How far behind `seen` no record stands."""
        partition = TopicPartition(*input_)
        reader = self._log.reader()
        try:
            reader.assign({partition: seen})
            deadline = time.monotonic() + _PROBE_S
            while reader.positions()[partition] < end and time.monotonic() < deadline:
                if records := reader.poll(1, 0.2):
                    return records[0].offset
            return reader.positions()[partition]
        finally:
            reader.close()

    def _read_notices(self) -> None:
        with self._reading:
            now_us = self._clock.now_us()
            for record in scan(self._log, [NOTICES], start=self._noticed):
                self._noticed[TopicPartition(record.topic, record.partition)] = record.offset + 1
                try:
                    event = decode_record(record)
                    if isinstance(event, Notice):
                        self.rulebook = self.rulebook.after(event)
                except (ConfigError, Refused) as error:
                    _logger.warning("attribution.notice_skipped", offset=record.offset, error=str(error))
            self._polled_us = now_us
