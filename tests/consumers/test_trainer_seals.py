"""The trainer on sealed tokens: the same bits as in the clear, erased people left out, and replays that know the difference."""

from __future__ import annotations

import threading
from collections.abc import Collection
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.consumers.trainer.arithmetic import run_arithmetic_trainer
from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.trainer.history import History, read_history
from rollwire.consumers.trainer.rehearsal import TOPICS, Rehearsal, plan
from rollwire.consumers.trainer.seals import SealOpener, open_batch
from rollwire.consumers.weights.revert import RevertRun, revert
from rollwire.kernels.policy.config import PolicyConfig
from rollwire.schemas.errors import ConfigError, Erased, KeyMissing
from rollwire.schemas.records import Coverage, Microbatch, PackedBatch, Position, Seal
from rollwire.schemas.validate import validate
from rollwire.streams.emit import outgoing
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.keys import KeyStore
from rollwire.streams.seams.keys_memory import MemoryKeys
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.sealing import seal_field
from rollwire.streams.seams.store_memory import MemoryStore

LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"
POLICY = PolicyConfig(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=2,
    moe_intermediate_size=16,
)  # fmt: skip
SPEC = Rehearsal(POLICY, LINEAGE, sequences=8)
CONFIG = TrainerConfig(checkpoint_every=2, routing_replay=False, threads=1)
EVERYBODY = frozenset(range(SPEC.sequences))


def person(index: int) -> str:
    return f"{index:032x}"


def clear(step: int) -> PackedBatch:
    stands = [Position(topic="routing-traces", partition=0, offset=i) for i in range(SPEC.sequences)]
    (batch,) = plan(SPEC, step, stands)
    return batch


def sealed(batch: PackedBatch, keys: KeyStore, who: Collection[int] = EVERYBODY) -> PackedBatch:
    """Sequence i of the plan sealed for person i, for those in `who`."""
    micros: list[Microbatch] = []
    first = 0
    for micro in batch.microbatches:
        bounds = np.frombuffer(micro.cu_seqlens, "<i4").tolist()
        tokens: list[bytes] = []
        seals: list[Seal | None] = []
        for index, (start, end) in enumerate(pairwise(bounds)):
            held, seal = micro.token_ids[start * 4 : end * 4], None
            if first + index in who:
                held, seal = seal_field(
                    keys, person(first + index), micro.rollout_ids[index], "token_ids", held
                )
            tokens.append(held)
            seals.append(seal)
        first += len(seals)
        micros.append(msgspec.structs.replace(micro, token_ids=b"".join(tokens), seals=tuple(seals)))
    coverage = (Coverage(outcome="answered", rollouts=len(who), signalled=len(who)),) if who else ()
    return msgspec.structs.replace(
        batch,
        microbatches=tuple(micros),
        coverage=coverage,
        cohort_size=len(who),
        cohort_mean=0.5 if who else None,
        max_age_ms=1_000 if who else None,
    )


def without(micro: Microbatch, gone: Collection[int]) -> list[tuple[object, ...]]:
    """Every sequence but those, as plain values."""
    bounds = np.frombuffer(micro.cu_seqlens, "<i4")
    mask_T = np.frombuffer(micro.loss_mask, "u1")
    trained = np.concatenate([[0], np.cumsum(mask_T)])
    rows: list[tuple[object, ...]] = []
    for b, (start, end) in enumerate(pairwise(bounds.tolist())):
        first, last = int(trained[start]), int(trained[end])
        if b not in gone:
            rows.append(
                (
                    micro.rollout_ids[b],
                    micro.token_ids[4 * start : 4 * end],
                    micro.loss_mask[start:end],
                    micro.logprobs[4 * first : 4 * last],
                    micro.versions[8 * first : 8 * last],
                    micro.advantages[4 * b : 4 * b + 4],
                    micro.traces[b],
                    micro.environments[b],
                    micro.fleets[b],
                )
            )
    return rows


@settings(deadline=None, max_examples=40)
@given(who=st.frozensets(st.integers(0, 7)), gone=st.frozensets(st.integers(0, 7)))
def test_what_is_opened_is_what_was_sealed_without_those_who_are_gone(
    who: frozenset[int], gone: frozenset[int]
) -> None:
    keys, batch = MemoryKeys(), clear(2)
    shut = sealed(batch, keys, who)
    validate(shut)
    for index in who:
        start = sum(len(m.rollout_ids) for m in batch.microbatches[:1])
        micro, b = (shut.microbatches[0], index) if index < start else (shut.microbatches[1], index - start)
        assert micro.seals[b] is not None
    for index in gone:
        keys.destroy(person(index))
    opened = open_batch(shut, keys)
    assert (opened.sealed, opened.left_out) == (len(who), len(who & gone))
    first = 0
    for before, after in zip(batch.microbatches, opened.batch.microbatches, strict=True):
        assert after.seals == ()
        local = {index - first for index in who & gone}
        assert without(after, ()) == without(before, local)
        first += len(before.rollout_ids)


def test_a_seal_that_does_not_fit_is_left_out_and_other_key_stores_are_told_apart() -> None:
    keys = MemoryKeys()
    shut = sealed(clear(1), keys)
    micro = shut.microbatches[0]
    moved = msgspec.structs.replace(micro, rollout_ids=(*reversed(micro.rollout_ids),))
    assert open_batch(msgspec.structs.replace(shut, microbatches=(moved,)), keys).left_out == len(
        micro.rollout_ids
    )
    with pytest.raises(KeyMissing, match="is this the key store"):
        open_batch(shut, MemoryKeys())
    with pytest.raises(ConfigError, match="no key store was handed in"):
        SealOpener(None).opened(shut)
    assert SealOpener(None).opened(clear(1)).batch == clear(1)


def write(log: MemoryLog, keys: KeyStore, steps: range, newest_revert: int | None = None) -> None:
    batches = [
        msgspec.structs.replace(sealed(clear(step), keys), newest_revert=newest_revert) for step in steps
    ]
    log.writer().write([outgoing(batch, source="test", time_us=batch.cut.clock_us) for batch in batches])


def train(log: MemoryLog, store: MemoryStore, keys: KeyStore, until_step: int) -> History:
    run_arithmetic_trainer(
        log,
        store,
        CONFIG,
        prefix="t.",
        model="policy",
        lineage=LINEAGE,
        stop=threading.Event(),
        until_step=until_step,
        keys=lambda: keys,
    )
    return read_history(log, "policy", LINEAGE, deadline_s=5, clock=SystemClock())


def test_an_erased_person_is_left_out_and_counted_and_a_replay_goes_through() -> None:
    log, store, keys = MemoryLog({**TOPICS, "weight-links": 1}), MemoryStore(), MemoryKeys()
    write(log, keys, range(1, 4))
    keys.destroy(person(0))
    keys.destroy(person(5))
    before = train(log, store, keys, 1)
    assert [(s.production_sequences, s.erased_sequences) for s in before.steps] == [(8, 2)]
    after = train(
        log, store, keys, 3
    )  # the checkpoint is version 0: step 1 is replayed, without the same two
    assert after.steps[0] == before.steps[0]
    for step in after.steps:
        validate(step)
        assert step.sequences == 8
        assert step.coverage == (Coverage(outcome="answered", rollouts=8, signalled=8),)


def test_a_replay_that_meets_somebody_erased_since_says_so_and_how_to_go_on() -> None:
    log, store, keys = MemoryLog({**TOPICS, "weight-links": 1}), MemoryStore(), MemoryKeys()
    write(log, keys, range(1, 5))
    train(log, store, keys, 3)
    keys.destroy(person(3))
    with pytest.raises(Erased, match=r"rebuilt from their deltas.*`rollwire weights revert --to 2`"):
        train(log, store, keys, 4)
    assert revert(RevertRun(log, store, "t.", "policy", LINEAGE, 2, "ann")).version == 4
    write(log, keys, range(5, 6), newest_revert=4)
    history = train(log, store, keys, 5)
    assert [step.erased_sequences for step in history.steps] == [0, 0, 0, 0, 0]  # person 3 came again
    assert history.versions[4].state_digest == history.versions[2].state_digest


def test_a_plan_of_erased_people_alone_is_a_step_that_measured_nothing() -> None:
    log, store, keys = MemoryLog({**TOPICS, "weight-links": 1}), MemoryStore(), MemoryKeys()
    write(log, keys, range(1, 3))
    for index in EVERYBODY:
        keys.destroy(person(index))
    history = train(log, store, keys, 2)
    for step in history.steps:
        validate(step)
        assert (step.trained_tokens, step.erased_sequences, step.mismatch.tokens) == (0, 8, 0)
    train(log, store, keys, 2)


@pytest.mark.torch
def test_the_policy_learns_the_same_bits_from_sealed_tokens_and_goes_on_without_the_erased() -> None:
    from rollwire.consumers.trainer.run import run_trainer
    from rollwire.kernels.policy.model import Policy
    from rollwire.kernels.policy.states import to_state

    def digests(keys: MemoryKeys | None, gone: Collection[int] = ()) -> tuple[list[str], list[int]]:
        log, store = MemoryLog(TOPICS), MemoryStore()
        batches = [clear(step) if keys is None else sealed(clear(step), keys) for step in (1, 2)]
        log.writer().write([outgoing(b, source="test", time_us=b.cut.clock_us) for b in batches])
        for index in gone:
            MemoryKeys.destroy(keys or MemoryKeys(), person(index))
        run_trainer(
            log,
            store,
            POLICY,
            CONFIG,
            prefix="t.",
            model="policy",
            lineage=LINEAGE,
            initial=to_state(Policy(POLICY, seed=3), "F32"),
            stop=threading.Event(),
            until_step=2,
            keys=None if keys is None else lambda: keys,
        )
        history = read_history(log, "policy", LINEAGE, deadline_s=5, clock=SystemClock())
        return [v.state_digest for v in history.versions], [s.erased_sequences for s in history.steps]

    plain = digests(None)
    assert digests(MemoryKeys()) == plain
    some = digests(MemoryKeys(), {1, 6})
    assert some[1] == [2, 2]
    assert some[0][1:] != plain[0][1:]
    assert digests(MemoryKeys(), EVERYBODY)[1] == [8, 8]
