"""Step plans as arrays for trainers of others: the records' own numbers, in order, with positions to commit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from rollwire.consumers.packed_batches import PackedBatchReader, Plan, RoutingShape
from rollwire.consumers.trainer.rehearsal import TOPICS, Rehearsal, rehearsal_log, sequences, write_plans
from rollwire.kernels.policy.config import PolicyConfig
from rollwire.schemas.errors import OffsetLost, PlanViolation
from rollwire.streams.seams.log import Outgoing, TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.store_memory import MemoryStore

LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"
POLICY = PolicyConfig(num_hidden_layers=2, num_experts=4)
SPEC = Rehearsal(POLICY, LINEAGE)
SHAPE = RoutingShape(2, 4, POLICY.num_experts_per_tok)
PARTITION = TopicPartition("packed-batches", 0)


def reader_of(
    log: MemoryLog, *, routing: RoutingShape | None = SHAPE, rank: int = 0, ranks: int = 1
) -> PackedBatchReader:
    return PackedBatchReader(
        log, MemoryStore(), model="policy", lineage=LINEAGE, rank=rank, ranks=ranks, routing=routing
    )


def test_plans_come_in_order_with_the_arrays_of_their_sequences() -> None:
    reader = reader_of(rehearsal_log(SPEC, 3))
    reader.start(0, 0)
    plans = list(reader.plans(timeout_s=5, until_step=3))
    assert [(plan.step, plan.version, dict(plan.position)) for plan in plans] == [
        (n, n, {PARTITION: n}) for n in (1, 2, 3)
    ]
    for plan in plans:
        made = sequences(SPEC, plan.step)
        rows = [
            (name, arrays.tokens_T[a:b], arrays.mask_T[a:b], arrays.advantages_B[i], routes[a:b])
            for name_B, arrays, routes in plan.microbatches
            if routes is not None
            for i, (name, (a, b)) in enumerate(zip(name_B, pairwise(arrays.cu_seqlens.tolist()), strict=True))
        ]
        assert len(rows) == len(made) == plan.batch.total_sequences
        for wanted, (name, tokens_T, mask_T, advantage, routes_TLK) in zip(made, rows, strict=True):
            assert name == wanted.rollout_id
            np.testing.assert_array_equal(tokens_T, wanted.tokens_T)
            assert int(mask_T.sum()) == wanted.logprobs.size
            assert advantage == np.float32(wanted.advantage)
            assert (routes_TLK[:-1] >= 0).all()
            assert (routes_TLK[-1] == -1).all()  # the last token was never an input: nothing is invented
        logp_S = np.concatenate([arrays.logp_S for arrays in plan.arrays])
        np.testing.assert_array_equal(logp_S, np.concatenate([one.logprobs for one in made]))
    reader.close()


def test_the_iteration_ends_when_no_plan_comes_and_goes_on_from_a_position() -> None:
    log = rehearsal_log(SPEC, 2)
    reader = reader_of(log)
    reader.start(0, 0)
    first: list[Plan] = list(reader.plans(timeout_s=0.05))
    assert [plan.step for plan in first] == [1, 2]
    write_plans(log, SPEC, range(3, 4))
    assert [plan.step for plan in reader.plans(timeout_s=5, until_step=3)] == [3]
    again = reader_of(log, routing=None)
    again.start(first[0].version, first[0].position[PARTITION], first[0].batch.plan_digest)
    plans = list(again.plans(timeout_s=5, until_step=3))
    assert [plan.step for plan in plans] == [2, 3]
    assert all(packed.routes_TLK is None for plan in plans for packed in plan.microbatches)
    assert plans[0].batch == first[1].batch


def test_a_plan_that_is_not_taken_is_read_again() -> None:
    reader = reader_of(rehearsal_log(SPEC, 2))
    reader.start(0, 0)
    for plan in reader.plans(timeout_s=5):
        assert plan.step == 1
        break
    reader.start(0, 0)
    assert next(reader.plans(timeout_s=5)).step == 1


@pytest.mark.parametrize(("version", "offset"), [(1, 0), (0, 1)])
def test_a_plan_for_another_version_halts(version: int, offset: int) -> None:
    reader = reader_of(rehearsal_log(SPEC, 3))
    reader.start(version, offset)
    with pytest.raises(PlanViolation):
        reader.read(5)


def test_repeats_are_dropped_and_what_was_passed_by_counts_as_consumed() -> None:
    log = MemoryLog(TOPICS)
    write_plans(log, SPEC._replace(lineage=LINEAGE[:-2] + "bb"), range(1, 3))
    write_plans(log, SPEC, range(1, 2))
    raw = log.reader()
    raw.assign({PARTITION: 2})
    again = raw.poll(1, 1.0)[0]
    log.writer().write([Outgoing(again.topic, again.key, again.value, again.headers, 0)])
    write_plans(log, SPEC, range(2, 3))
    reader = reader_of(log)
    reader.start(0, 0)
    consumed = [plan.consumed for plan in reader.plans(timeout_s=5, until_step=2)]
    assert [(one.start, one.end) for one in consumed] == [(0, 3), (3, 5)]


def test_each_rank_reads_its_own_slices() -> None:
    spec = SPEC._replace(ranks=2)
    log = rehearsal_log(spec, 1)
    names: list[str] = []
    for rank in (0, 1):
        reader = reader_of(log, rank=rank, ranks=2)
        reader.start(0, 0)
        plan = next(reader.plans(timeout_s=5))
        assert plan.consumed.partition == rank
        names += [name for packed in plan.microbatches for name in packed.rollout_ids]
    assert names == [one.rollout_id for one in sequences(spec, 1)]


def test_routes_of_another_model_and_lost_positions_halt() -> None:
    log = rehearsal_log(SPEC, 2)
    reader = reader_of(log, routing=RoutingShape(3, 4, POLICY.num_experts_per_tok))
    reader.start(0, 0)
    with pytest.raises(PlanViolation, match="layers"):
        next(reader.plans(timeout_s=5))
    log.trim(PARTITION, 1)
    reader.start(0, 0)
    with pytest.raises(OffsetLost):
        reader.read(1)
