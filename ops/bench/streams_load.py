"""What `rollwire bench streams` feeds in: groups of rollouts with their rewards, as encoded records, and the writing of them.

A few groups with random arrays are made and encoded; all others are copies of them under another group id, which has
the same length, so that a run's input takes no longer to make than to write. A rollout has a prompt of a fifth, everything
behind it was sampled, over two versions' spans, and is trained on. Rewards differ within every group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from rollwire.schemas.codec import encode
from rollwire.schemas.ids import new_group_id, rollout_id
from rollwire.schemas.partitioner import partition_for
from rollwire.schemas.records import Component, Event, Reward, Rollout, Segment, Span, WeightVersion
from rollwire.streams import synthetic
from rollwire.streams.seams.log import Outgoing, Writer

MEMBERS: Final = 16
MODEL: Final = "policy"
LINEAGE: Final = "0f8fad5b-d9cb-469f-a165-70867728950e"
TEMPLATES: Final = 16
_SOURCE: Final = "rollwire/bench"
_BATCH_BYTES: Final = 32 << 20


class Load(NamedTuple):
    """One kind of rollout."""

    name: str
    tokens: int
    groups: int

    @property
    def rollouts(self) -> int:
        return self.groups * MEMBERS


def _rollout(rng: np.random.Generator, group: str, index: int, tokens: int, at_us: int) -> Rollout:
    prompt = tokens // 5
    sampled = tokens - prompt
    return Rollout(
        rollout_id=rollout_id(group, index),
        group_id=group,
        index=index,
        group_size=MEMBERS,
        model=MODEL,
        lineage=LINEAGE,
        environment="countdown",
        task_id="3f2a9c0e51d7b684",
        task='{"numbers":[3,5,7,11],"target":22}',
        token_ids=rng.integers(0, 150_000, tokens, dtype="<u4").tobytes(),
        token_dtype="u4",
        segments=(
            Segment(kind="prompt", start=0, end=prompt),
            Segment(kind="sampled", start=prompt, end=tokens),
        ),
        loss_mask=bytes(prompt) + b"\x01" * sampled,
        logprobs=(-rng.random(sampled, dtype=np.float32)).astype("<f4").tobytes(),
        spans=(
            Span(version=0, start=0, end=sampled // 2),
            Span(version=0, start=sampled // 2, end=sampled),
        ),
        finish_reason="stop",
        temperature=1.0,
        top_k_experts=0,
        fleet="fleet",
        replica=f"fleet-{index % 4}",
        seed=int(rng.integers(0, 2**62)),
        started_us=at_us,
        finished_us=at_us + 100_000,
    )


def _reward(group: str, index: int, at_us: int) -> Reward:
    value = float(index % 2)
    return Reward(
        rollout_id=rollout_id(group, index),
        group_id=group,
        reward=value,
        components=(Component(name="right", value=value),),
        outcome="right" if value else "wrong value",
        source="verifier",
        verifier="countdown",
        verifier_version="1",
        evidence=(),
        scored_us=at_us + 200_000,
    )


def record_of(event: Event, at_us: int) -> Outgoing:
    encoded = encode(event, source=_SOURCE, time_us=at_us)
    return Outgoing(encoded.topic, encoded.key, encoded.value, encoded.headers, encoded.partition)


def anchor(at_us: int) -> WeightVersion:
    """Version 0, without which nothing is planned."""
    return synthetic.version(0, lineage=LINEAGE, model=MODEL, at_us=at_us)


class Generator:
    """Encoded groups of one load, as many as wanted. The groups of two generators with other seeds differ in their ids."""

    def __init__(self, load: Load, *, at_us: int, seed: int, templates: int = TEMPLATES) -> None:
        self._rng = np.random.default_rng(seed)
        self._at_us = at_us
        self._templates: list[tuple[bytes, list[Outgoing]]] = []
        for _ in range(min(templates, load.groups)):
            group = self._id(at_us)
            events: list[Event] = []
            for index in range(MEMBERS):
                events += (
                    _rollout(self._rng, group, index, load.tokens, at_us),
                    _reward(group, index, at_us),
                )
            self._templates.append((group.encode(), [record_of(event, at_us) for event in events]))
        self._made = 0

    def _id(self, at_us: int) -> str:
        return new_group_id(at_us, int.from_bytes(self._rng.bytes(10), "little"))

    def group(self, at_us: int | None = None) -> tuple[str, list[Outgoing]]:
        """A new group, opened at `at_us`: rollout, reward, rollout, reward, ..."""
        old, records = self._templates[self._made % len(self._templates)]
        self._made += 1
        group = self._id(self._at_us if at_us is None else at_us)
        new = group.encode()
        return group, [
            record._replace(
                key=new,
                value=(record.value or b"").replace(old, new),
                headers=tuple((name, (value or b"").replace(old, new)) for name, value in record.headers),
            )
            for record in records
        ]


def balanced(
    generator: Generator, groups: int, partitions: int, at_us: int | None = None
) -> Iterator[list[Outgoing]]:
    """`groups` groups of which every partition gets its equal share, one partition after the other."""
    waiting: list[list[list[Outgoing]]] = [[] for _ in range(partitions)]
    for number in range(groups):
        wanted = waiting[number % partitions]
        while not wanted:
            group, records = generator.group(at_us)
            waiting[partition_for(group.encode(), partitions)].append(records)
        yield wanted.pop(0)


def fill(writer: Writer, groups: Iterator[list[Outgoing]]) -> int:
    """Writes groups and the anchor; gives the bytes of all values."""
    batch: list[Outgoing] = []
    size = total = 0
    for records in groups:
        batch += records
        size += sum(len(record.value or b"") for record in records)
        if size >= _BATCH_BYTES:
            writer.write(batch, 60.0)
            total += size
            batch, size = [], 0
    writer.write(batch, 60.0)
    return total + size
