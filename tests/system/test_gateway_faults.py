"""The running gateway while its broker stands still, while it is killed, and while it is told to stop (C69)."""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from rollwire.ops.stack import StackInfo, read_stack
from rollwire.schemas.ids import new_group_id
from rollwire.schemas.records import Feedback
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

ROLLWIRE: Final = Path(sys.executable).with_name("rollwire")
WAIT_S: Final = 60.0
SENDERS: Final = 8
STOP_S: Final = 10.0  # what a process has to end


class Answered(NamedTuple):
    feedback_id: str
    status: int  # 0 = no answer: the connection broke
    code: str
    retry_after: str | None
    repeated: bool


class Gateway:
    """`rollwire gateway` as a process. `start` again after it ended: another port."""

    def __init__(self, stack: StackInfo, prefix: str) -> None:
        self._command: list[str | Path] = [
            ROLLWIRE, "gateway", "--open", "--port", "0", "--deadline-s", "3",
            "--prefix", prefix, "--dir", stack.dir,
        ]  # fmt: skip
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        self.port = int(process.stdout.readline().rpartition(":")[2])
        return process

    def restart(self) -> None:
        self.close()
        self.process = self._start()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def figures(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=WAIT_S) as page:
            lines = page.read().decode().splitlines()
        found: dict[str, float] = {}
        for line in lines:
            name, _, rest = line.partition("{")
            if name.startswith("rollwire_events_"):
                found[name] = found.get(name, 0.0) + float(rest.split()[-1])
        return found


class Senders:
    """Threads that send one event after the other, each anew under its id until it is taken."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._stop = threading.Event()
        self.heard: queue.SimpleQueue[Answered] = queue.SimpleQueue()
        self.all: list[Answered] = []
        self._rollout = f"{new_group_id(time.time_ns() // 1_000, 1)}.0"
        self._happened = time.time()
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(SENDERS)]
        for thread in self._threads:
            thread.start()

    def until(self, true: Callable[[list[Answered]], object]) -> list[Answered]:
        """Waits for answers of which `true` holds; those since the last call."""
        deadline = time.monotonic() + WAIT_S
        found: list[Answered] = []
        while not true(found):
            found.append(self.heard.get(timeout=max(0.1, deadline - time.monotonic())))
        self.all += found
        return found

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        while not self.heard.empty():
            self.all.append(self.heard.get())

    def _run(self, sender: int) -> None:
        pause, number = threading.Event(), 0
        while not self._stop.is_set():
            answered = self._send(f"s{sender}-{number}")
            self.heard.put(answered)
            if answered.status == 200:
                number += 1
            else:
                pause.wait(0.05)

    def _send(self, name: str) -> Answered:
        body = {"feedback_id": name, "rollout_id": self._rollout, "signal": "thumb", "value": 1}
        body["happened_at"] = self._happened
        connection = http.client.HTTPConnection("127.0.0.1", self._gateway.port, timeout=WAIT_S)
        try:
            connection.request("POST", "/v1/feedback", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            said: dict[str, Any] = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError):
            return Answered(name, 0, "", None, False)
        finally:
            connection.close()
        return Answered(
            name,
            response.status,
            str(said.get("code", "")),
            response.headers.get("retry-after"),
            said.get("repeated") is True,
        )


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def accepted(answers: list[Answered]) -> list[str]:
    return [one.feedback_id for one in answers if one.status == 200]


def test_c69_whatever_happens_an_event_that_was_acknowledged_is_in_the_topic(
    stack: StackInfo, prefix: str
) -> None:
    with closing(Gateway(stack, prefix)) as gateway:
        senders = Senders(gateway)
        try:
            senders.until(lambda found: len(accepted(found)) >= 50)

            with stopped(read_stack(stack.dir).pids["kafka"]):
                refused = senders.until(lambda found: sum(one.status == 503 for one in found) >= 2 * SENDERS)
                for one in refused:
                    assert one.status in (200, 503), one
                    assert one.status == 200 or int(one.retry_after or 0) >= 1
                    assert one.status == 200 or one.code in ("outcome_unknown", "unavailable", "overloaded")
            senders.until(lambda found: len(accepted(found)) >= 50)
            figures = gateway.figures()
            assert figures["rollwire_events_received_total"] == sum(figures.values()) / 2

            gateway.process.kill()
            senders.until(lambda found: any(one.status == 0 for one in found))
            gateway.restart()
            senders.until(lambda found: len(accepted(found)) >= 50)

            gateway.process.send_signal(signal.SIGTERM)
            began_s = time.monotonic()
            assert gateway.process.wait(WAIT_S) == 0
            assert time.monotonic() - began_s < STOP_S + 5.0
            last = senders.until(lambda found: any(one.status == 0 for one in found))
            assert {one.status for one in last} <= {0, 200, 503}
            gateway.restart()
            senders.until(lambda found: len(accepted(found)) >= 50)
        finally:
            senders.stop()

    with closing(KafkaLog(stack.bootstrap, prefix=prefix, client_id="test")) as log:
        events = [decode_record(record) for record in scan(log, ["user-feedback"])]
    written = [event.feedback_id for event in events if isinstance(event, Feedback)]
    told = accepted(senders.all)
    assert len(told) == len(set(told)) >= 200
    assert set(told) <= set(written)
    # Sent again after a broken connection or a 503 it is the same event, whether the first one was written or not.
    assert not [one for one in senders.all if one.code == "conflicting_repeat"]
