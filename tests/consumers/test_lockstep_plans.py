"""Plans with places that have nothing for a rank, as `lockstep` makes them, through reader and trainer."""

from __future__ import annotations

import threading

import msgspec
import pytest

from rollwire.consumers.packed_batches import PackedBatchReader, RoutingShape
from rollwire.consumers.trainer.history import read_history
from rollwire.consumers.trainer.rehearsal import TINY as POLICY
from rollwire.consumers.trainer.rehearsal import TOPICS, Rehearsal, rehearsal_log
from rollwire.schemas.records import PackedBatch
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.pack_layout import build_microbatch
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log import Outgoing
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store_memory import MemoryStore

LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"
STEPS = 2


def with_places(log: MemoryLog) -> MemoryLog:
    """The same traces and plans, with an empty microbatch before and behind those of each plan."""
    other = MemoryLog(TOPICS)
    records: list[Outgoing] = []
    for record in scan(log, tuple(TOPICS)):
        event = decode_record(record)
        if isinstance(event, PackedBatch):
            place = build_microbatch([])
            event = msgspec.structs.replace(event, microbatches=(place, *event.microbatches, place))
            records.append(outgoing(event, source="test", time_us=event.cut.clock_us))
        else:
            records.append(Outgoing(record.topic, record.key, record.value, record.headers, record.partition))
    other.writer().write(records)
    return other


def test_the_reader_hands_out_places_without_sequences() -> None:
    log = with_places(rehearsal_log(Rehearsal(POLICY, LINEAGE), STEPS))
    shape = RoutingShape(POLICY.num_hidden_layers, POLICY.num_experts, POLICY.num_experts_per_tok)
    reader = PackedBatchReader(
        log, MemoryStore(), model="policy", lineage=LINEAGE, rank=0, ranks=1, routing=shape
    )
    reader.start(0, 0)
    plans = list(reader.plans(timeout_s=5, until_step=STEPS))
    assert len(plans) == STEPS
    for plan in plans:
        sizes = [len(packed.rollout_ids) for packed in plan.microbatches]
        assert sizes[0] == sizes[-1] == 0 < min(sizes[1:-1])
        place = plan.microbatches[0]
        assert place.arrays.tokens_T.size == place.arrays.cu_seqlens[-1] == 0
        assert place.routes_TLK is None
    reader.close()


@pytest.mark.torch
def test_the_trainer_passes_places_by() -> None:
    from rollwire.consumers.trainer.config import TrainerConfig
    from rollwire.consumers.trainer.run import run_trainer
    from rollwire.kernels.policy.model import Policy
    from rollwire.kernels.policy.states import to_state

    log = rehearsal_log(Rehearsal(POLICY, LINEAGE), STEPS)
    digests: list[list[str]] = []
    for one in (with_places(log), log):
        run_trainer(
            one, MemoryStore(), POLICY, TrainerConfig(no_replay_every=2), prefix="t.", model="policy", lineage=LINEAGE,
            initial=to_state(Policy(POLICY, seed=3), "F32"), stop=threading.Event(), until_step=STEPS,
        )  # fmt: skip
        history = read_history(one, "policy", LINEAGE, deadline_s=5, clock=SystemClock())
        digests.append([version.state_digest for version in history.versions])
    assert len(digests[0]) == STEPS + 1
    assert digests[0] == digests[1]
