"""A lineage may begin from the tensors that a trainer holds."""

from __future__ import annotations

import numpy as np

from rollwire.consumers.version_publisher import VersionPublisher
from rollwire.consumers.weights.paths import plan_path
from rollwire.consumers.weights.reader import load_version
from rollwire.schemas.records import WeightVersion
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store_memory import MemoryStore


def test_arrays_that_go_on_changing_begin_a_lineage() -> None:
    log = MemoryLog({"weight-versions": 1, "weight-links": 1, "evaluations": 1})
    store = MemoryStore()
    held = np.arange(12, dtype=np.float32).reshape(3, 4).T
    weights = {"scale": np.ones(1, np.float32), "table": held}
    publisher = VersionPublisher(log, store, model="policy", lineage="run", ranks=0)
    started = publisher.start(weights)
    held[0, 0] = 7.0
    publisher.publish_alone(weights, 1, copy=True)
    held[0, 0] = 8.0
    publisher.close()
    events = [decode_record(r) for r in scan(log, ("weight-versions",), clock=SystemClock())]
    versions = [event for event in events if isinstance(event, WeightVersion)]
    assert [event.version for event in versions] == [0, 1]
    for version, first in ((0, 0.0), (1, 7.0)):
        state = load_version(store, plan_path(versions, [], None, version), None)
        table = state["table"].bits.view(np.float32).reshape(4, 3)
        assert table[0, 0] == first
        assert np.array_equal(table.reshape(-1)[1:], np.arange(12.0).reshape(3, 4).T.reshape(-1)[1:])
    assert started.state["table"].bits.view(np.float32)[0] == 0.0
