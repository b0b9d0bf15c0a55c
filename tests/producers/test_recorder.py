"""The recorder of live answers: what ends its thread is seen by whoever answers on."""

from __future__ import annotations

import pytest

from rollwire.producers.serving.recorder import Recorder, Unsealed
from rollwire.schemas.errors import RollwireError
from rollwire.schemas.records import ProductionRollout
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log_memory import MemoryLog

DEADLINE_S = 30.0


def test_a_fault_of_any_kind_is_seen_and_says_nothing_of_the_answer() -> None:
    def make() -> ProductionRollout | None:
        raise ValueError("what a person wrote")

    recorder = Recorder(MemoryLog({"production-rollouts": 1}), clock=SystemClock(), patience_s=1.0)
    try:
        recorder.check()
        recorder.put(Unsealed("id", make, lambda durable: None))
        assert not recorder.flush(DEADLINE_S)
        with pytest.raises(RollwireError, match="can no longer be written: ValueError") as caught:
            recorder.check()
        assert "person" not in str(caught.value)
    finally:
        recorder.close()
