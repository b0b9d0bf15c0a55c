"""The parts of the streams benchmark that need no broker: its input, its pattern, its percentiles."""

from __future__ import annotations

import io

from fastavro import schemaless_reader

from rollwire.ops.bench.events import sample_events
from rollwire.ops.bench.streams import sizes, steps
from rollwire.ops.bench.streams_latency import head_schema, share
from rollwire.ops.bench.streams_load import MEMBERS, Generator, Load, balanced
from rollwire.schemas.codec import decode, encode
from rollwire.schemas.framing import PREFIX_BYTES
from rollwire.schemas.partitioner import partition_for
from rollwire.schemas.records import PackedBatch, Reward, Rollout

_US = 1_767_225_600_000_000


def test_rollouts_are_of_the_sizes_that_are_named() -> None:
    for size, low, high in zip(sizes(short=True), (1_900, 95_000), (2_200, 105_000), strict=True):
        _, records = Generator(size.load, at_us=_US, seed=1, templates=1).group()
        lengths = [len(record.value or b"") for record in records if record.topic == "rollouts"]
        assert len(lengths) == MEMBERS
        assert low < min(lengths) <= max(lengths) < high


def test_copies_of_a_group_are_good_events_of_another_group() -> None:
    generator = Generator(Load("2kb", 200, 40), at_us=_US, seed=1, templates=2)
    groups = {}
    for _ in range(5):
        group, records = generator.group(_US + 1_000_000)
        events = [decode(r.topic, r.value, r.headers, r.key) for r in records]
        assert [type(event) for event in events] == [Rollout, Reward] * MEMBERS
        assert {event.group_id for event in events if isinstance(event, Rollout | Reward)} == {group}
        rewards = {event.reward for event in events if isinstance(event, Reward)}
        assert len(rewards) > 1  # a group of equal rewards would be filtered
        groups[group] = events
    assert len(groups) == 5


def test_every_partition_gets_its_equal_share() -> None:
    generator = Generator(Load("2kb", 20, 40), at_us=_US, seed=1, templates=1)
    counts = [0, 0, 0, 0]
    for records in balanced(generator, 40, 4):
        counts[partition_for(records[0].key or b"", 4)] += 1
    assert counts == [10, 10, 10, 10]


def test_the_head_of_a_plan_is_read_without_its_arrays() -> None:
    plan = sample_events(1)["packed_batch"]
    assert isinstance(plan, PackedBatch)
    body = io.BytesIO(encode(plan, source="test", time_us=_US).value)
    body.seek(PREFIX_BYTES)
    head = schemaless_reader(body, head_schema(), None)
    assert isinstance(head, dict)
    assert head["step"] == plan.step
    assert tuple(head["group_ids"]) == plan.group_ids


def test_a_percentile_is_a_value_that_was_measured() -> None:
    assert share([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert share([1.0, 2.0, 3.0, 4.0], 0.99) == 4.0
    assert share([float(n) for n in range(1, 101)], 0.99) == 99.0
    assert share([7.0], 0.5) == 7.0


def test_every_run_is_told_of() -> None:
    assert steps(5, grow=True) > steps(5, grow=False) == 37
