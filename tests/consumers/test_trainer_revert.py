"""The trainer on torch over a revert: the state it goes on from is the older version's, to the bit."""

from __future__ import annotations

import threading
from functools import cache

import pytest

from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.trainer.history import History, read_history
from rollwire.consumers.trainer.rehearsal import TINY as POLICY
from rollwire.consumers.trainer.rehearsal import TOPICS, Rehearsal, write_plans
from rollwire.consumers.trainer.run import run_trainer
from rollwire.consumers.weights.revert import RevertRun, revert
from rollwire.kernels.policy.model import Policy
from rollwire.kernels.policy.states import to_state
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.store_memory import MemoryStore

pytestmark = pytest.mark.torch

LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"
SPEC = Rehearsal(POLICY, LINEAGE, sequences=8)


@cache
def reverted(checkpoint_every: int) -> History:
    """Five steps, back to version 3, and on from there to step 7 by a trainer that is started anew."""
    log, store = MemoryLog({**TOPICS, "weight-links": 1}), MemoryStore()

    def train(until: int) -> None:
        run_trainer(
            log,
            store,
            POLICY,
            TrainerConfig(checkpoint_every=checkpoint_every, learning_rate=1e-3),
            prefix="t.",
            model="policy",
            lineage=LINEAGE,
            initial=to_state(Policy(POLICY, seed=3), "F32"),
            stop=threading.Event(),
            until_step=until,
        )

    write_plans(log, SPEC, range(1, 7))
    train(5)
    made = revert(RevertRun(log, store, "t.", "policy", LINEAGE, 3, "ann"))
    assert made.version == 6
    write_plans(log, SPEC, range(7, 8), newest_revert=6)
    train(7)
    return read_history(log, "policy", LINEAGE, deadline_s=30.0, clock=SystemClock())


def test_replayed_to_an_older_version_or_restored_by_its_checkpoint_is_the_same() -> None:
    replayed, restored = reverted(5), reverted(1)
    assert [v.checkpoint is not None for v in replayed.versions] == [True, *[False] * 4, True, False, False]
    assert all(v.checkpoint is not None for v in restored.versions)
    digests = [v.state_digest for v in replayed.versions]
    assert digests == [v.state_digest for v in restored.versions]
    assert digests[6] == digests[3]
    assert len(set(digests)) == len(digests) - 1
