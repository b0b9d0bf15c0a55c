"""`rollwire dlq` against the real broker: refused, replayed, refused again; refused, mended, replayed, accepted."""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from rollwire.consumers.ledger import count_ledger
from rollwire.ops.cli import run
from rollwire.ops.stack import StackInfo
from rollwire.schemas import records as r
from rollwire.streams import synthetic
from rollwire.streams.assemble_config import AssembleConfig
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.seams.log import Outgoing
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.settlement import replay_count

pytestmark = pytest.mark.system


def now_us() -> int:
    return time.time_ns() // 1_000


def until(holds: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "the condition did not come true"


def groups(log: KafkaLog) -> set[str]:
    found = [decode_record(record) for record in scan(log, ["groups"])]
    return {group.group_id for group in found if isinstance(group, r.Group)}


def test_refused_replayed_and_refused_again_then_mended_and_accepted(
    stack: StackInfo,
    prefix: str,
    log: KafkaLog,
    letters: Callable[[], list[r.DeadLetter]],
    assembling: Callable[[AssembleConfig], AbstractContextManager[None]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    at = ["--bootstrap", stack.bootstrap, "--prefix", prefix]

    def dlq(*words: str) -> tuple[int, str]:
        capsys.readouterr()
        code = run(["dlq", *words, *at])
        return code, capsys.readouterr().out

    def listed() -> list[dict[str, object]]:
        return [json.loads(line) for line in dlq("list", "--json")[1].splitlines()]

    config = AssembleConfig(group_deadline_s=600, require_traces=False)
    assert dlq("list") == (1, "there are no dead letters\n")
    bad_group, early = synthetic.group_id(now_us(), 1), synthetic.group_id(now_us() + 120_000_000, 2)
    good = outgoing(synthetic.reward(bad_group, 0, 1.0, at_us=now_us()), source="test", time_us=now_us())
    # A reward that is none: the codec would not write it, so its bytes are made by hand from a good one.
    reward = synthetic.reward(bad_group, 1, 0.5, at_us=now_us())
    body = outgoing(reward, source="test", time_us=now_us())
    value = (body.value or b"").replace(struct.pack("<d", 0.5), struct.pack("<d", math.nan))
    log.writer().write([good, Outgoing("rewards", body.key, value, body.headers)])
    # A group from a clock that is two minutes ahead: refused, until its time has come or the bound is raised.
    ahead: list[r.Event] = [synthetic.rollout(early, i, 2, at_us=now_us()) for i in range(2)]
    ahead += [synthetic.reward(early, i, float(i), at_us=now_us()) for i in range(2)]
    log.writer().write([outgoing(e, source="test", time_us=now_us()) for e in ahead])

    with assembling(config.model_copy(update={"ahead_s": 60.0})):
        until(lambda: len(letters()) == 5)
        assert {(one["reason"], one["state"]) for one in listed()} == {
            ("not_finite", "pending"),
            ("time_invalid", "pending"),
        }
        name = next(str(one["id"]) for one in listed() if one["reason"] == "not_finite")
        code, said = dlq("show", name)
        assert code == 0
        assert "not_finite" in said
        assert "do           Drop it" in said
        # A dry run writes nothing; without a terminal nobody can be asked.
        assert dlq("replay", "--reason", "not_finite", "--dry-run")[0] == 0
        assert dlq("replay", "--reason", "not_finite")[0] == 2
        assert dlq("replay", "--reason", "late", "--yes")[0] == 1
        assert len(letters()) == 5
        assert dlq("replay", "--reason", "not_finite", "--yes")[0] == 0
        until(lambda: len(letters()) == 6)
        again = [one for one in listed() if one["reason"] == "not_finite"]
        assert [(one["state"], one["refusals"]) for one in again] == [("replayed", 1), ("pending", 2)]
        assert replay_count([(h.key, h.value) for h in letters()[-1].headers]) == 1
        assert letters()[-1].value == value
        assert dlq("drop", "--reason", "not_finite", "--why", "the verifier is mended", "--yes")[0] == 0
        assert groups(log) == set()

    with assembling(config.model_copy(update={"ahead_s": 3_600.0})):
        assert dlq("replay", "--reason", "time_invalid", "--yes")[0] == 0
        until(lambda: groups(log) == {early})
    assert {one["state"] for one in listed()} == {"replayed", "dropped"}
    assert dlq("replay", "--yes")[0] == 1  # nothing is pending
    assert len(letters()) == 6
    ledger = count_ledger(log, prefix)
    assert [(line.topic, line.missing_ids, line.extra_ids) for line in ledger.lines if line.gap] == []
    assert (ledger["rewards"].received, ledger["rewards"].refused) == (7, 4)
    assert (ledger["rollouts"].accepted, ledger["rollouts"].refused) == (2, 2)
