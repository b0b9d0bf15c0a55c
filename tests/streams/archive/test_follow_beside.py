"""Records that are hashed beside the reading: the same result, in the same order, and no error is lost."""

from __future__ import annotations

import pytest

from rollwire.schemas.records import Claim
from rollwire.streams.archive.chain import SEGMENT_RECORDS, Chain
from rollwire.streams.archive.follow import Follower
from rollwire.streams.archive.follow_beside import Beside, Run
from rollwire.streams.archive.heads import Head
from rollwire.streams.archive.verify_tables import Placed
from rollwire.streams.seams.log import Record, TopicPartition
from rollwire.streams.seams.scan import BATCH, next_count

PLACE = TopicPartition("rollouts", 0)
CLAIM = Claim(key="k", size=0, sha256="")
HEAD = Head(
    format=1, name="n", epoch=1, previous="", sealed_us=0, root="", size=0, table=CLAIM, marks=CLAIM, partitions=(),
    expired=(), archived=(), key_id="", code_version="",
)  # fmt: skip


def record(offset: int, size: int) -> Record:
    value = bytes([offset % 251]) * size
    return Record(PLACE.topic, PLACE.partition, offset, 1_000 + offset, b"key", value, (("h", b"v"),))


def placed(records: list[Record]) -> list[Placed]:
    chain = Chain(PLACE, 0)
    made = [*(chain.add(one) for one in records), chain.close()]
    return [Placed(segment, HEAD) for segment in made if segment is not None]


@pytest.mark.parametrize("sizes", [(100,), (40_000,), (100, 40_000, 70_000)])
def test_batches_are_followed_in_order_whatever_their_size(sizes: tuple[int, ...]) -> None:
    count = 2 * SEGMENT_RECORDS + 10
    records = [record(i, sizes[i // 20 % len(sizes)]) for i in range(count)]
    segments = placed(records)
    read = list(records)
    read[SEGMENT_RECORDS] = record(SEGMENT_RECORDS, 1)  # of the second segment: another value
    follower = Follower(segments)
    with Beside({PLACE: follower}) as beside:
        for at in range(0, count, 20):
            beside.take([Run(PLACE, read[at : at + 20])])
    follower.end()
    firsts = [one.segment.first for one in segments]
    assert follower.records == count
    assert (follower.verified, follower.unlike) == ({firsts[0], firsts[2]}, {firsts[1]})


@pytest.mark.parametrize("size", [10, 40_000])
def test_an_error_of_a_follower_is_raised(size: int) -> None:
    with pytest.raises(KeyError), Beside({}) as beside:
        beside.take([Run(PLACE, [record(0, size)])])


def test_polls_bring_fewer_records_where_they_are_large() -> None:
    assert next_count([], 7) == 7
    assert next_count([record(0, 1_000)], 7) == BATCH
    assert next_count([record(0, 100_000), record(1, 100_000)], BATCH) == 20
    assert next_count([record(0, 8 << 20)], BATCH) == 1
