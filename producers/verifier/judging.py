"""From rollouts to rewards: pure. What is scored, by whom, and what the event then says."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.producers.emit import decode_record
from rollwire.producers.verifier.frames import ScoreRequest
from rollwire.schemas.errors import Refused
from rollwire.schemas.records import Component, Reward, Rollout
from rollwire.streams.seams.environment import Verdict
from rollwire.streams.seams.log import Record, TopicPartition

_TOKEN_DTYPES: Final = {"u1": "<u1", "u2": "<u2", "u4": "<u4"}


class Case(NamedTuple):
    """A rollout that is ours to score, and the record it came in."""

    record: Record
    rollout: Rollout


class Skips(NamedTuple):
    """Records that get no reward from this verifier, by why."""

    refused: int = 0  # undecodable: `assemble` owns their dead letters
    foreign: int = 0  # of another environment: another verifier's
    repeats: int = 0  # a rollout id that was scored already

    def plus(self, other: Skips) -> Skips:
        return Skips(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class RecentIds:
    """The last `capacity` rollout ids that were rewarded, so that a producer's repeat gets no second reward.

    A hint, not the truth: `assemble` drops the repeats that outlive it.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._ids: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, rollout_id: str) -> bool:
        return rollout_id in self._ids

    def add(self, rollout_ids: Iterable[str]) -> None:
        for rollout_id in rollout_ids:
            self._ids[rollout_id] = None
        while len(self._ids) > self._capacity:
            self._ids.popitem(last=False)

    def clear(self) -> None:
        self._ids.clear()


def select(records: Sequence[Record], environment: str, recent: RecentIds) -> tuple[list[Case], Skips]:
    """The cases among `records`, in order, and how many were passed over."""
    cases: list[Case] = []
    refused = foreign = repeats = 0
    seen: set[str] = set()
    for record in records:
        try:
            event = decode_record(record)
        except Refused:
            refused += 1
            continue
        if not isinstance(event, Rollout) or event.environment != environment:
            foreign += 1
        elif event.rollout_id in seen or event.rollout_id in recent:
            repeats += 1
        else:
            seen.add(event.rollout_id)
            cases.append(Case(record, event))
    return cases, Skips(refused, foreign, repeats)


def sampled_ids(rollout: Rollout) -> NDArray[np.int64]:
    """[S] the sampled tokens of all sampled segments, in order."""
    token_ids_T = np.frombuffer(rollout.token_ids, dtype=_TOKEN_DTYPES[rollout.token_dtype])
    parts = [token_ids_T[s.start : s.end] for s in rollout.segments if s.kind == "sampled"]
    return np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64)


def score_request(rollout: Rollout) -> ScoreRequest:
    return ScoreRequest(rollout.task, sampled_ids(rollout).astype("<i8").tobytes(), rollout.finish_reason)


def reward_event(case: Case, verdict: Verdict, *, verifier: str, version: str) -> Reward:
    """The reward of a verdict: a function of the record and the verifier's version, bit for bit.

    `scored_us` is the log's own time of the rollout, not a clock reading: scoring the record again after a crash or in
    a replay gives the same event (law 9).
    """
    return Reward(
        rollout_id=case.rollout.rollout_id,
        group_id=case.rollout.group_id,
        reward=verdict.reward,
        components=tuple(Component(name=name, value=value) for name, value in verdict.components),
        outcome=verdict.outcome,
        source="verifier",
        verifier=verifier,
        verifier_version=version,
        evidence=(),
        scored_us=case.record.timestamp_ms * 1_000,
    )


def offsets_before(
    positions: dict[TopicPartition, int], unhandled: Sequence[Record]
) -> dict[TopicPartition, int]:
    """What may be committed when `unhandled` of the records read up to `positions` are still open."""
    offsets = dict(positions)
    for record in unhandled:
        partition = TopicPartition(record.topic, record.partition)
        offsets[partition] = min(offsets[partition], record.offset)
    return offsets
