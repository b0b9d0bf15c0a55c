"""The history run in its short form, and its members alone in a storm of rebalances."""

from __future__ import annotations

import threading
import time
import uuid
from pathlib import Path

import msgspec
import pytest

from rollwire.ops.chaos.history import await_answers
from rollwire.ops.chaos.history_book import Book, read_history
from rollwire.ops.chaos.history_check import check
from rollwire.ops.chaos.history_clients import Task, follow
from rollwire.ops.chaos.history_faults import Clients
from rollwire.ops.chaos.history_log import SOURCE, Ends, read_out
from rollwire.ops.cli import run
from rollwire.ops.stack import StackInfo
from rollwire.streams.seams.log_kafka import KafkaLog

pytestmark = pytest.mark.system


def test_the_short_form(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two faults, an empty list of errors, a control that goes red."""
    json = tmp_path / "figures.json"
    command = "chaos history --seconds 12 --every 6 --control-seconds 2 --seed 7 --json"
    assert run([*command.split(), str(json)]) == 0, capfd.readouterr()
    results = msgspec.json.decode(json.read_bytes())["results"]
    values = {result["name"]: result["value"] for result in results}
    assert values["history.errors"] == 0
    assert values["history.faults"] == 2
    assert values["history.ops"] > 300
    assert values["history.control_errors"] >= 4
    assert values["history.control_red"] == values["history.control_rounds"] == 2
    shown = capfd.readouterr().out
    assert "hold-request" in shown
    assert "let go within the next transaction: taken for its own" in shown


def _echoed(books: Path) -> set[int]:
    ops = read_history(books)
    return {sent.source for op in ops if op.outcome == "ok" for sent in op.sends if sent.source is not None}


def test_c39_rebalances_with_commits(stack: StackInfo, tmp_path: Path) -> None:
    """Members join, leave and are killed while each commits offsets with what it wrote: every value is echoed once."""
    prefix = f"t{uuid.uuid4().hex[:12]}."
    ends = Ends(stack.bootstrap, prefix)
    ends.create()
    books = tmp_path / "books"
    task = Task(
        role="producer", name="", number=0, bootstrap=stack.bootstrap, prefix=prefix, folder=str(books), per_second=30.0, seed=0
    )  # fmt: skip
    clients = Clients(task, tmp_path / "clients")
    log = KafkaLog(stack.bootstrap, prefix)
    stop = threading.Event()
    reader = threading.Thread(target=follow, args=(log, Book(books, "reader"), stop))
    reader.start()
    try:
        clients.start("producer", "producer-1")
        for name in ("member-1", "member-2", "member-3"):
            clients.start("member", name)
            clients.wait_ready(name)
        clients.stop(["member-1"])
        clients.start("member", "member-4")
        clients.kill("member-2")
        clients.wait_ready("member-4")
        clients.stop(["member-3"])
        clients.start("member", "member-5")
        clients.wait_ready("member-5")
        clients.check()
        deadline = time.monotonic() + 30
        while len(_echoed(books)) <= 20:
            assert time.monotonic() < deadline, "the members had nothing to do"
            stop.wait(0.1)
        clients.stop(["producer-1"])
        assert await_answers(ends, log) == []
        clients.stop(["member-4", "member-5"])
        out = read_out(log, Book(books, "final"), ends.settled(log, 30.0), 30.0)
    finally:
        stop.set()
        clients.kill_all()
        reader.join(10.0)
    ops = read_history(books)
    assert check(ops, out, [SOURCE]) == []
    log.close()
