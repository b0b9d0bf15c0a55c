"""Both clients against an HTTP server that keeps what it accepts, by id, and fails as it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rollwire.producers.feedback import AsyncFeedbackClient, FeedbackClient, FeedbackCounts, RefusedFeedback
from rollwire.schemas.errors import (
    ConfigError,
    DeadlineExceeded,
    FeedbackError,
    GatewayRefused,
    Refused,
    SpoolFull,
)
from rollwire.schemas.ids import new_group_id

ROLLOUT = new_group_id(1_767_225_600_000_000, 3) + ".0"
Fault = Callable[[BaseHTTPRequestHandler, list[dict[str, Any]]], bool]


class Gateway:
    """Answers as the gateway does. `faults`: what happens to the next requests instead; each says whether it answered."""

    def __init__(self) -> None:
        self.events: dict[str, dict[str, Any]] = {}
        self.repeats = 0
        self.requests: list[int] = []
        self.faults: list[Fault] = []
        self.down: int | None = None  # the status of every answer while it is down
        self._lock = threading.Condition()
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                gateway.post(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def wait_for_requests(self, more: int) -> bool:
        """That many more than now."""
        with self._lock:
            wanted = len(self.requests) + more
            return self._lock.wait_for(lambda: len(self.requests) >= wanted, 60)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def post(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["content-length"]))
        if request.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        events = [json.loads(line) for line in body.splitlines()]
        with self._lock:
            self.requests.append(len(events))
            self._lock.notify_all()
            fault = self.faults.pop(0) if self.faults else None
            if fault is not None and fault(request, events):
                return
            if self.down is not None:
                answer(request, self.down, {"code": "unavailable"})
                return
            words = [self._take(event) for event in events]
        answer(request, 200, {"request_id": "r", "items": words})

    def _take(self, event: dict[str, Any]) -> dict[str, Any]:
        if event["signal"] == "nonsense":
            return {"status": 400, "code": "unknown_signal", "field": "items[0].signal", "detail": "no"}
        repeated = event["feedback_id"] in self.events
        self.repeats += repeated
        self.events[event["feedback_id"]] = event
        return {"status": 200, "feedback_id": event["feedback_id"], "repeated": repeated}


def answer(request: BaseHTTPRequestHandler, status: int, body: Any, **headers: str) -> None:
    data = json.dumps(body).encode()
    request.send_response(status)
    for name, text in headers.items():
        request.send_header(name.replace("_", "-"), text)
    request.send_header("content-length", str(len(data)))
    request.end_headers()
    request.wfile.write(data)


def says(status: int, **headers: str) -> Fault:
    def fault(request: BaseHTTPRequestHandler, events: Sequence[Any]) -> bool:
        answer(request, status, {"code": f"said_{status}"}, **headers)
        return True

    return fault


def _passes(request: BaseHTTPRequestHandler, events: Sequence[Any]) -> bool:
    return False


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    made = Gateway()
    yield made
    made.close()


def _stored_but_unanswered(gateway: Gateway) -> Fault:
    """The answer is lost on its way: the client cannot know."""

    def fault(request: BaseHTTPRequestHandler, events: list[dict[str, Any]]) -> bool:
        for event in events:
            gateway._take(event)
        request.close_connection = True
        request.connection.close()
        return True

    return fault


class Either:
    """One set of tests for both clients: the async one on an event loop of its own."""

    def __init__(self, kind: str, url: str, **settings: Any) -> None:
        self._loop = None if kind == "sync" else asyncio.new_event_loop()
        self._client: Any
        if self._loop is None:
            self._client = FeedbackClient(url, key="rw_k_s", **settings)
        else:
            self._client = self._loop.run_until_complete(self._make(url, settings))

    async def _make(self, url: str, settings: dict[str, Any]) -> AsyncFeedbackClient:
        return AsyncFeedbackClient(url, key="rw_k_s", **settings)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        loop = self._loop
        if loop is None or name == "counts":
            return method
        return lambda *given, **named: loop.run_until_complete(method(*given, **named))

    def end(self) -> None:
        with contextlib.suppress(FeedbackError):
            self.close(0.1)
        if self._loop is not None:
            self._loop.close()


@pytest.fixture(params=["sync", "async"])
def make(request: pytest.FixtureRequest, gateway: Gateway) -> Iterator[Callable[..., Any]]:
    made: list[Either] = []

    def make_one(**settings: Any) -> Any:
        made.append(Either(request.param, settings.pop("url", gateway.url), **settings))
        return made[-1]

    yield make_one
    for client in made:
        client.end()


def test_what_is_sent_arrives_in_batches(make: Callable[..., Any], gateway: Gateway) -> None:
    client = make(linger_s=5.0)
    ids = [client.send(ROLLOUT, "thumb", 1) for _ in range(1_200)]
    client.flush(30)
    assert list(gateway.events) == ids
    assert len(gateway.requests) <= 5, "one request for many events; a flush does not linger"
    assert client.counts() == FeedbackCounts(1_200, 1_200, 0, 0, 0, 0)


def test_a_single_event_goes_after_its_linger(make: Callable[..., Any], gateway: Gateway) -> None:
    client = make(linger_s=0.0)
    client.send(ROLLOUT, "thumb", -1, subject="user-7", comment="no")
    client.flush(30)
    (event,) = gateway.events.values()
    assert (event["value"], event["subject"], event["comment"]) == (-1, "user-7", "no")


def test_an_answer_that_is_lost_costs_nothing(make: Callable[..., Any], gateway: Gateway) -> None:
    gateway.faults = [_stored_but_unanswered(gateway), says(503), says(429, Retry_After="0"), says(500)]
    client = make(linger_s=60)  # all in one request
    ids = [client.send(ROLLOUT, "thumb", 1) for _ in range(5)]
    client.flush(30)
    assert list(gateway.events) == ids
    counts = client.counts()
    assert (counts.accepted, counts.repeated, counts.pending) == (5, 5, 0)


def test_a_refused_event_is_handed_back_and_not_sent_again(
    make: Callable[..., Any], gateway: Gateway
) -> None:
    refused: list[RefusedFeedback] = []
    client = make(on_refused=refused.append)
    good = client.send(ROLLOUT, "thumb", 1)
    bad = client.send(ROLLOUT, "nonsense", 1)
    also = client.send(ROLLOUT, "thumb", 1)
    client.flush(30)
    assert list(gateway.events) == [good, also]
    (one,) = refused
    assert (one.feedback_id, one.code, one.field) == (bad, "unknown_signal", "signal")
    assert one.event["signal"] == "nonsense"
    assert client.counts() == FeedbackCounts(3, 2, 0, 1, 0, 0)


def test_a_callback_that_fails_ends_nothing(make: Callable[..., Any], gateway: Gateway) -> None:
    def fails(refused: RefusedFeedback) -> None:
        raise RuntimeError("the caller's fault")

    client = make(on_refused=fails)
    client.send(ROLLOUT, "nonsense", 1)
    client.flush(30)
    client.send(ROLLOUT, "thumb", 1)
    client.flush(30)
    assert len(gateway.events) == 1


def test_a_wrong_key_is_said_at_once_and_nothing_is_dropped(
    make: Callable[..., Any], gateway: Gateway, tmp_path: Path
) -> None:
    gateway.down = 401
    client = make(spool=tmp_path)
    client.send(ROLLOUT, "thumb", 1)
    with pytest.raises(GatewayRefused, match=r"401.*check the key.*1 event waits in the spool"):
        client.flush(30)
    gateway.down = None
    client.flush(30)
    assert len(gateway.events) == 1


def test_a_gateway_that_is_away_is_said_at_the_deadline(make: Callable[..., Any], tmp_path: Path) -> None:
    client = make(url="http://127.0.0.1:9", spool=tmp_path)
    client.send(ROLLOUT, "thumb", 1)
    with pytest.raises(DeadlineExceeded, match=r"gave no answer.*1 event waits in the spool"):
        client.flush(1)
    client.close(0.1)
    with pytest.raises(FeedbackError, match="closed"):
        client.send(ROLLOUT, "thumb", 1)


def test_what_would_be_lost_is_said(make: Callable[..., Any], gateway: Gateway) -> None:
    gateway.down = 503
    client = make()
    client.send(ROLLOUT, "thumb", 1)
    with pytest.raises(FeedbackError, match=r"1 event is lost, not acknowledged.*spool"):
        client.close(0.3)


def test_a_full_queue_is_an_error_of_send(make: Callable[..., Any], gateway: Gateway, tmp_path: Path) -> None:
    gateway.down = 503
    client = make(spool=tmp_path, max_bytes=128 * 1024)

    def fill() -> None:
        for _ in range(100):
            client.send(ROLLOUT, "comment", comment="x" * 3_000, subject="u")

    with pytest.raises(SpoolFull, match=r"not taken"):
        fill()
    gateway.down = None
    client.flush(60)
    counts = client.counts()
    assert counts.accepted == counts.sent == len(gateway.events) > 20


def test_the_next_client_sends_what_one_left(
    make: Callable[..., Any], gateway: Gateway, tmp_path: Path
) -> None:
    gateway.down = 503
    first = make(spool=tmp_path, fsync_s=0)
    left = [first.send(ROLLOUT, "thumb", 1) for _ in range(10)]
    first.close(0.1)
    gateway.down = None
    second = make(spool=tmp_path)
    second.flush(30)
    assert sorted(gateway.events) == sorted(left)
    assert second.counts().accepted == 10
    second.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"url": "feedback.example.com"}, "no http or https address"),
        ({"url": ""}, "ROLLWIRE_FEEDBACK_URL"),
        ({"key": ""}, "ROLLWIRE_FEEDBACK_KEY"),
        ({"key": "rw_a b"}, "cut or quoted"),
        ({"batch": 0}, "batch=0"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"linger_s": -1}, "linger_s=-1"),
        ({"max_bytes": 1}, "max_bytes=1"),
    ],
)
def test_a_wrong_setting_says_what_is_right(
    settings: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROLLWIRE_FEEDBACK_URL", raising=False)
    monkeypatch.delenv("ROLLWIRE_FEEDBACK_KEY", raising=False)
    given: dict[str, Any] = {"url": "https://feedback.example.com", "key": "rw_a"} | settings
    with pytest.raises(ConfigError, match=said):
        FeedbackClient(**given)


def test_the_environment_names_gateway_and_key(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLWIRE_FEEDBACK_URL", gateway.url + "/v1/feedback")
    monkeypatch.setenv("ROLLWIRE_FEEDBACK_KEY", "rw_k_s")
    with FeedbackClient() as client:
        client.send(ROLLOUT, "thumb", 1)
    assert len(gateway.events) == 1, "leaving the block flushes"


def test_what_is_wrong_is_said_by_send(gateway: Gateway) -> None:
    with FeedbackClient(gateway.url, key="rw_k") as client:
        with pytest.raises(Refused, match="rollout id"):
            client.send("chatcmpl-123", "thumb", 1)
        assert client.counts().sent == 0


def test_many_threads_send(gateway: Gateway) -> None:
    with FeedbackClient(gateway.url, key="rw_k") as client:
        ids: list[str] = []
        threads = [
            threading.Thread(
                target=lambda: ids.extend([client.send(ROLLOUT, "thumb", 1) for _ in range(200)])
            )
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        client.flush(60)
        assert set(ids) == set(gateway.events)
        assert client.counts() == FeedbackCounts(1_600, 1_600, 0, 0, 0, 0)


@pytest.mark.parametrize("spooled", [False, True])
def test_the_child_of_a_fork_sends_its_own(spooled: bool, gateway: Gateway, tmp_path: Path) -> None:
    """As a web server does that loads the application, then forks its workers."""
    program = f"""
import os, sys
from rollwire.producers.feedback import FeedbackClient
client = FeedbackClient({gateway.url!r}, key="rw_k", spool={str(tmp_path) if spooled else None!r})
client.send({ROLLOUT!r}, "thumb", 1, feedback_id="parent")
child = os.fork()
if child == 0:
    client.send({ROLLOUT!r}, "thumb", 1, feedback_id="child")
    client.close(30)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
client.close(30)
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], timeout=120, check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert set(gateway.events) == {"parent", "child"}
    assert gateway.repeats == 0


def test_c69_kill_9_loses_nothing_that_send_took(gateway: Gateway, tmp_path: Path) -> None:
    """Three processes share a spool and are killed as they send, in the middle of requests that fail half of the time."""
    program = f"""
import signal
from rollwire.producers.feedback import FeedbackClient
client = FeedbackClient({gateway.url!r}, key="rw_k", spool={str(tmp_path / "spool")!r}, linger_s=0, batch=20)
for _ in range(2_000):
    print(client.send({ROLLOUT!r}, "thumb", 1), flush=True)
signal.pause()
"""
    gateway.faults = [says(503), _passes, _stored_but_unanswered(gateway), _passes] * 20
    sent: list[str] = []
    for number in range(3):
        said = tmp_path / f"said-{number}"
        with said.open("w") as out:
            process = subprocess.Popen([sys.executable, "-P", "-c", program], stdout=out)
            assert gateway.wait_for_requests(6), "some are answered then, some are not yet"
            os.kill(process.pid, signal.SIGKILL)
            process.wait(30)
        sent += said.read_text().split("\n")[:-1]
        said.unlink()
    gateway.faults = []
    with FeedbackClient(gateway.url, key="rw_k", spool=tmp_path / "spool") as client:
        client.flush(60)
    assert len(sent) > 24
    assert set(sent) - set(gateway.events) == set(), "taken by `send`, and lost"
    assert len(set(gateway.events) - set(sent)) <= 3, "at most one each whose id was not printed any more"
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_client_that_nobody_closes_sends_at_the_end(gateway: Gateway) -> None:
    program = (
        "from rollwire.producers.feedback import FeedbackClient\n"
        f"FEEDBACK = FeedbackClient({gateway.url!r}, key='rw_k', linger_s=60)\n"
        f"FEEDBACK.send({ROLLOUT!r}, 'thumb', 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], timeout=60, check=True, capture_output=True, text=True
    )
    assert done.stderr == ""
    assert len(gateway.events) == 1
