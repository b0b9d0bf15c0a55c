"""Replays on the real broker: a history that assemble and pack wrote, decided again and replayed with other settings."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from rollwire.ops.cli import run
from rollwire.ops.stack import StackInfo
from rollwire.schemas.records import Event, GroupFate, PackedBatch
from rollwire.streams import synthetic
from rollwire.streams.assemble_config import AssembleConfig
from rollwire.streams.emit import outgoing, take
from rollwire.streams.pack import PackConfig
from rollwire.streams.run_pack import run_pack
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store_s3 import S3Store
from rollwire.streams.settings_notice import tell

pytestmark = pytest.mark.system

ASSEMBLE: Final = AssembleConfig(group_deadline_s=300.0, require_traces=False)
PACK: Final = PackConfig(groups_per_step=4, max_lag_versions=1, max_steps_ahead=0)

Assembling = Callable[[AssembleConfig], AbstractContextManager[None]]
WaitFor = Callable[[Callable[[], bool], float], None]


def now_us() -> int:
    return time.time_ns() // 1_000


def write(log: KafkaLog, events: list[Event]) -> None:
    writer = log.writer()
    writer.write([outgoing(event, source="rollwire/test", time_us=now_us()) for event in events])
    writer.close()


def a_group(number: int) -> list[Event]:
    """Two rollouts and their rewards; every third group has equal ones."""
    at_us = now_us()
    group = synthetic.group_id(at_us, number)
    rewards = (0.5, 0.5) if number % 3 == 0 else (0.0, 1.0)
    rollouts = [synthetic.rollout(group, i, 2, at_us=at_us, top_k=0) for i in range(2)]
    return [*rollouts, *(synthetic.reward(group, i, rewards[i], at_us=at_us) for i in range(2))]


@contextmanager
def packing(log: KafkaLog, prefix: str) -> Iterator[None]:
    stop = threading.Event()
    line = {"model": "policy", "lineage": synthetic.LINEAGE}
    thread = threading.Thread(
        target=run_pack, args=(log, PACK), kwargs={"prefix": prefix, "stop": stop, **line}, daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(15)
        assert not thread.is_alive()


def _planned(log: KafkaLog, step: int) -> bool:
    events = (take(record).event for record in scan(log, ["packed-batches"]))
    return any(isinstance(event, PackedBatch) and event.step == step for event in events)


def _stale(log: KafkaLog) -> bool:
    events = (take(record).event for record in scan(log, ["group-fates"]))
    return any(isinstance(event, GroupFate) and event.reason == "stale" for event in events)


def test_t7_a_history_is_decided_again_and_replayed_with_other_settings(
    stack: StackInfo,
    store: S3Store,
    log: KafkaLog,
    prefix: str,
    assembling: Assembling,
    wait_for: WaitFor,
    tmp_path: Path,
) -> None:
    store.ensure_bucket()
    for processor, config in (("assemble", {"assemble": ASSEMBLE}), ("pack", {"pack": PACK})):
        told = tell(
            log,
            processor,
            config,
            model="policy",
            lineage=synthetic.LINEAGE,
            code="test",
            clock=SystemClock(),
        )
        assert told
    with assembling(ASSEMBLE), packing(log, prefix):
        write(log, [synthetic.version(0, at_us=now_us())])
        write(log, [event for number in range(1, 25) for event in a_group(number)])
        for step in (1, 2):
            wait_for(partial(_planned, log, step), 60.0)
            write(log, [synthetic.version(step, at_us=now_us())])
        wait_for(partial(_stale, log), 60.0)  # for step 3 all of them are
    at = ["--dir", str(stack.dir)]

    def answer(*command: str, code: int = 0) -> Any:
        file = tmp_path / "answer.json"
        file.unlink(missing_ok=True)
        assert run([*command, *at, "--json", str(file)]) == code
        return json.loads(file.read_text())

    report = answer("audit", "replay", "--prefix", prefix)
    assert report["findings"] == []
    assert report["checked"]["packed-batches"] == 2
    assert report["checked"]["groups"] == 16
    one, other, loose = (f"w{name}.{prefix}" for name in ("one", "two", "lag"))
    which = ("replay", "assemble", "pack", "--prefix", prefix)
    alone = answer(*which, "--into", one)
    shared = answer(*which, "--into", other, "--workers", "2")
    assert shared["digests"] == alone["digests"]
    assert alone["written"]["groups"] == 16
    changed = answer(*which, "--into", loose, "--set", "pack.max_lag_versions=9")
    assert changed["digests"]["groups"] == alone["digests"]["groups"]
    assert answer("audit", "diff", one, other)["moved"] == []
    compared = answer("audit", "diff", one, loose, code=1)
    assert {(m["a"], m["b"]) for m in compared["moved"]} >= {
        ("dropped: stale, by pack", "kept: trained, by pack")
    }
    assert compared["kept_b"] > compared["kept_a"]
    for into in (one, prefix, ""):  # holds records, is the history, is no prefix
        assert run([*which, "--into", into, *at]) == 2
