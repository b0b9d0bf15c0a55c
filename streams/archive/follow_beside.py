"""Hands records to the followers of their partitions: large ones to a thread beside the one that reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Final, NamedTuple, Self

from rollwire.streams.archive.follow import Follower
from rollwire.streams.seams.log import Record, TopicPartition

_LARGE: Final = 16 * 1024
"""Bytes of value, on average, from which on most of the work is hashing, which goes on without the GIL. With smaller records
two threads would only wait for one another."""
_WAITING: Final = 4  # batches that are read, and not hashed yet


class Run(NamedTuple):
    """Records of one partition, in order."""

    place: TopicPartition
    records: Sequence[Record]


class Beside:
    """Gives batches to followers in the order in which they came. Of one thread; after `with` all are given."""

    def __init__(self, followers: Mapping[TopicPartition, Follower]) -> None:
        self._followers = followers
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hash")
        self._going: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._wait(0)
        finally:
            self._pool.shutdown(cancel_futures=True)

    def take(self, batch: Sequence[Run]) -> None:
        """Raises what a follower raises, then or at a later call."""
        if _large(batch):
            self._wait(_WAITING - 1)
            self._going.append(self._pool.submit(self._take, batch))
        else:
            self._wait(0)
            self._take(batch)

    def _take(self, batch: Sequence[Run]) -> None:
        for run in batch:
            self._followers[run.place].take(run.records)

    def _wait(self, left: int) -> None:
        while len(self._going) > left:
            self._going.popleft().result()


def _large(batch: Sequence[Run]) -> bool:
    nbytes = sum([len(record[5] or b"") for run in batch for record in run.records])
    return nbytes >= _LARGE * sum([len(run.records) for run in batch])
