"""What `rollwire bench replay` reads: rollouts of 1 kB and of 100 kB, with their CloudEvents headers, in all partitions.

They are valid events and hold random tokens and logprobs, which do not compress; few share them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from rollwire.ops.bench.streams_load import MEMBERS, Generator, Load, balanced, fill
from rollwire.ops.topics import apply_topics
from rollwire.streams.seams.log import Outgoing, TopicPartition
from rollwire.streams.seams.log_kafka import KafkaLog

TOPIC: Final = "rollouts"
_AT_US: Final = 1_767_225_600_000_000
_KINDS: Final = 2  # rollouts and rewards, one after the other
_DRAWN_TOKENS: Final = 100_000  # of the rollouts that are held at a time, over their group's size


class Size(NamedTuple):
    """One size of record. Key, headers and value together have about `nbytes`."""

    name: str
    tokens: int
    groups: int

    @property
    def records(self) -> int:
        return self.groups * MEMBERS


class Sizes(NamedTuple):
    small: Size
    large: Size
    rounds: int
    weights_mb: int
    versions: int
    steps: int  # of the demo run that is trained again


FULL: Final = Sizes(Size("1kb", 64, 25_000), Size("100kb", 12_000, 192), 5, 100, 50, 40)
QUICK: Final = Sizes(Size("1kb", 64, 250), Size("100kb", 12_000, 8), 1, 4, 5, 3)


class Source(NamedTuple):
    """A filled topic under a prefix of its own, without a hole from 0 to its end."""

    bootstrap: str
    prefix: str
    size: Size
    ends: dict[TopicPartition, int]
    value_bytes: int

    @property
    def records(self) -> int:
        return sum(self.ends.values())

    def log(self) -> KafkaLog:
        return KafkaLog(self.bootstrap, self.prefix, client_id="rollwire-bench", connect=True)  # as audits do


def filled(bootstrap: str, prefix: str, size: Size, *, seed: int) -> Source:
    """Makes the catalogue's topics under `prefix`, and writes the rollouts."""
    apply_topics(
        bootstrap, prefix
    )  # all of them: whoever verifies looks at each, and waits for one that is missing
    log = KafkaLog(bootstrap, prefix, client_id="rollwire-bench")
    writer = log.writer()
    try:
        value_bytes = fill(writer, _rollouts(size, log.partitions(TOPIC), seed))
    finally:
        writer.close()
    ends = log.end_offsets([TopicPartition(TOPIC, p) for p in range(log.partitions(TOPIC))])
    return Source(bootstrap, prefix, size, ends, value_bytes)


def _rollouts(size: Size, partitions: int, seed: int) -> Iterator[list[Outgoing]]:
    """Groups of rollouts, some at a time: each time others are drawn."""
    most = max(partitions, _DRAWN_TOKENS // size.tokens)
    for first in range(0, size.groups, most):
        count = min(most, size.groups - first)
        load = Load(size.name, size.tokens, count)
        generator = Generator(load, at_us=_AT_US, seed=seed + first, templates=count)
        for records in balanced(generator, count, partitions):
            yield records[::_KINDS]
