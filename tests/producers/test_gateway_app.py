"""The gateway over the memory log, asked as a server asks it (C69, C70)."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

from rollwire.producers.emit import decode_record
from rollwire.producers.gateway.access import LocalQuotas, OpenAccess
from rollwire.producers.gateway.app import GatewayApp
from rollwire.producers.gateway.config import GatewayConfig
from rollwire.producers.gateway.serve import make_app
from rollwire.schemas.errors import LogUnavailable, StoreUnavailable
from rollwire.schemas.ids import new_group_id
from rollwire.schemas.records import Feedback
from rollwire.streams.seams.keys import DataKey
from rollwire.streams.seams.keys_memory import MemoryKeys
from rollwire.streams.seams.log import Outgoing, Record, Writer
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan

TIMEOUT_S = 30.0
SECRET = b"s" * 32
JSON = {"content-type": "application/json"}
NDJSON = {"content-type": "application/x-ndjson"}


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Ask = Callable[..., Coroutine[Any, Any, Answer]]


async def ask_app(
    app: GatewayApp,
    path: str,
    body: bytes | Sequence[bytes] = b"",
    headers: Mapping[str, str] = JSON,
    *,
    method: str = "POST",
    stalls: bool = False,
) -> Answer:
    """One request. Several pieces come one by one, without a length; with `stalls`, the last one never does."""
    pieces = [body] if isinstance(body, bytes) else list(body)
    path, _, query = path.partition("?")
    length = {"content-length": str(len(body))} if isinstance(body, bytes) and method == "POST" else {}
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "headers": [(n.encode(), v.encode()) for n, v in {**headers, **length}.items()],
    }
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.sleep(0)
        if not pieces or (stalls and len(pieces) == 1):
            await asyncio.Event().wait()
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message: Any) -> None:
        sent.append(message)

    await asyncio.wait_for(asyncio.create_task(app(scope, receive, send)), TIMEOUT_S)
    start, end = sent
    named = {n.decode(): v.decode() for n, v in start["headers"]}
    assert named["x-request-id"]
    assert "content-length" not in named or int(named["content-length"]) == len(end["body"])
    return Answer(start["status"], named, end["body"])


@asynccontextmanager
async def running(app: GatewayApp) -> AsyncIterator[Ask]:
    said: asyncio.Queue[Any] = asyncio.Queue()
    heard: asyncio.Queue[Any] = asyncio.Queue()
    life = asyncio.create_task(app({"type": "lifespan"}, said.get, heard.put))
    await said.put({"type": "lifespan.startup"})
    assert (await heard.get())["type"] == "lifespan.startup.complete"

    async def ask(path: str, *arguments: Any, **options: Any) -> Answer:
        return await ask_app(app, path, *arguments, **options)

    try:
        yield ask
    finally:
        await said.put({"type": "lifespan.shutdown"})
        assert (await asyncio.wait_for(heard.get(), TIMEOUT_S))["type"] == "lifespan.shutdown.complete"
        await life


def config(**changed: Any) -> GatewayConfig:
    return GatewayConfig.model_validate(changed)


def new_log() -> MemoryLog:
    return MemoryLog({"user-feedback": 4})


def written(log: MemoryLog) -> list[Record]:
    return list(scan(log, ["user-feedback"]))


def events(log: MemoryLog) -> list[Feedback]:
    found = [decode_record(record) for record in written(log)]
    return [event for event in found if isinstance(event, Feedback)]


def said(number: int = 0, **fields: Any) -> dict[str, Any]:
    rollout = f"{new_group_id(time.time_ns() // 1_000, number)}.0"
    return {"rollout_id": rollout, "signal": "thumb", "value": 1, "feedback_id": f"f{number}"} | fields


def raw(*items: Any) -> bytes:
    return b"\n".join(json.dumps(item).encode() for item in items)


def figures(answer: Answer) -> dict[str, float]:
    """The ledger as /metrics shows it."""
    found: dict[str, float] = {}
    for line in answer.body.decode().splitlines():
        if line.startswith("rollwire_events_"):
            name = line.split("{")[0].removeprefix("rollwire_events_").removesuffix("_total")
            found[name] = found.get(name, 0.0) + float(line.split()[-1])
    return found


async def assert_adds_up(ask: Ask, received: int, **parts: int) -> None:
    found = figures(await ask("/metrics", method="GET"))
    assert found["received"] == received
    for name in ("accepted", "refused", "shed", "pending"):
        assert found.get(name, 0.0) == parts.get(name, 0), (name, found)


def run(scenario: Callable[[Ask], Awaitable[None]], log: MemoryLog, **options: Any) -> None:
    async def whole() -> None:
        keys = options.pop("keys", MemoryKeys())
        async with running(make_app(log, keys, SECRET, **options)) as ask:
            await scenario(ask)

    asyncio.run(whole())


def test_an_event_is_in_the_log_when_it_is_answered() -> None:
    log = new_log()

    async def scenario(ask: Ask) -> None:
        answer = await ask("/v1/feedback", raw(said(1, subject="me")), {**JSON, "x-request-id": "mine"})
        assert answer.status == 200
        assert answer.json == {
            "status": 200,
            "feedback_id": "f1",
            "id_source": "client",
            "repeated": False,
            "request_id": "mine",
        }
        assert answer.headers["x-request-id"] == "mine"
        (event,) = events(log)
        assert (event.feedback_id, event.tenant, event.value) == ("f1", "default", 1.0)
        assert len(event.subject) == 32
        await assert_adds_up(ask, 1, accepted=1)

    run(scenario, log)


def test_c70_same_content_is_the_same_answer_other_content_a_409_and_both_are_kept() -> None:
    log = new_log()

    async def scenario(ask: Ask) -> None:
        one = said(1)
        first = await ask("/v1/feedback", raw(one))
        again = await ask("/v1/feedback", raw(one))
        assert again.json | {"request_id": ""} == first.json | {"repeated": True, "request_id": ""}
        for other in ({"value": -1}, {"happened_at": time.time()}, {"subject": "me"}):
            conflict = await ask("/v1/feedback", raw(one | other))
            assert (conflict.status, conflict.json["code"]) == (409, "conflicting_repeat")
        assert [dict(record.headers).get("refused") for record in written(log)] == [
            None,
            *[b"conflicting_repeat"] * 3,
        ]
        await assert_adds_up(ask, 5, accepted=2, refused=3)

    run(scenario, log)


def test_c70_fifty_at_once_are_one() -> None:
    log = new_log()

    async def scenario(ask: Ask) -> None:
        one = raw(said(1))
        answers = await asyncio.gather(*(ask("/v1/feedback", one) for _ in range(50)))
        assert {answer.status for answer in answers} == {200}
        assert sum(not answer.json["repeated"] for answer in answers) == 1
        assert len(written(log)) == 1

    run(scenario, log)


def test_without_an_id_the_content_is_the_id() -> None:
    log = new_log()

    async def scenario(ask: Ask) -> None:
        one = said(1)
        del one["feedback_id"]
        first, again = await ask("/v1/feedback", raw(one)), await ask("/v1/feedback", raw(one))
        assert first.json["id_source"] == "content"
        assert again.json["feedback_id"] == first.json["feedback_id"]
        assert again.json["repeated"] is True

    run(scenario, log)


def test_a_batch_has_a_word_on_every_event_in_order() -> None:
    log = new_log()

    async def scenario(ask: Ask) -> None:
        items = [
            said(1),
            said(2, value=3),
            said(3, comment="so so", subject="me"),
            said(1),
            said(1, value=-1),
        ]
        answer = await ask("/v1/feedback", raw(*items[:2]) + b"\n{nonsense\n" + raw(*items[2:]), NDJSON)
        assert answer.status == 207
        words = answer.json["items"]
        assert [word["status"] for word in words] == [200, 400, 400, 200, 200, 409]
        assert [word.get("field") for word in words] == [
            None,
            "items[1].value",
            "items[2]",
            None,
            None,
            "items[5].feedback_id",
        ]
        assert [word.get("repeated") for word in words] == [False, None, None, False, True, None]
        assert (answer.json["accepted"], answer.json["refused"]) == (3, 3)
        assert {event.feedback_id for event in events(log)} == {"f1", "f3"}
        assert b"so so" not in b"".join(record.value or b"" for record in written(log))
        await assert_adds_up(ask, 6, accepted=3, refused=3)
        whole = await ask("/v1/feedback", json.dumps([said(7), said(8)]).encode())
        assert (whole.status, whole.json["accepted"]) == (200, 2)

    run(scenario, log)


class HeldLog(MemoryLog):
    """Its writers wait until they are let go."""

    def __init__(self) -> None:
        super().__init__({"user-feedback": 4})
        self.go = threading.Event()

    def writer(self) -> Writer:
        log, inner = self, super().writer()

        class HeldWriter:
            def write(self, records: Sequence[Outgoing], timeout_s: float = 30.0) -> None:
                assert log.go.wait(TIMEOUT_S)
                inner.write(records, timeout_s)

            def close(self) -> None:
                inner.close()

        return HeldWriter()


def test_the_ledger_adds_up_while_events_are_under_way_and_after_they_were_given_up() -> None:
    log = HeldLog()

    async def scenario(ask: Ask) -> None:
        try:
            waiting = asyncio.create_task(
                ask("/v1/feedback", raw(said(1), said(2), said(3, value=7)), NDJSON)
            )
            deadline = time.monotonic() + TIMEOUT_S
            while figures(await ask("/metrics", method="GET"))["received"] < 3:
                assert time.monotonic() < deadline
            await assert_adds_up(ask, 3, pending=3)
            assert (await waiting).json["code"] == "outcome_unknown"
            await assert_adds_up(ask, 3, shed=3)
            log.go.set()
            while (
                b'rollwire_feedback_late_total{topic="user-feedback"} 2.0'
                not in (await ask("/metrics", method="GET")).body
            ):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            await assert_adds_up(ask, 3, shed=3)
        finally:
            log.go.set()

    run(scenario, log, config=config(deadline_s=3.0))


class AwayWriter:
    def write(self, records: Sequence[Outgoing], timeout_s: float = 30.0) -> None:
        raise LogUnavailable("the broker is away")

    def close(self) -> None:
        """Nothing is held."""


class AwayLog(MemoryLog):
    def writer(self) -> Writer:
        return AwayWriter()


def test_c69_without_the_broker_it_is_503_with_retry_after_and_nothing_is_2xx() -> None:
    async def scenario(ask: Ask) -> None:
        for number in range(20):
            answer = await ask("/v1/feedback", raw(said(number)))
            assert (answer.status, answer.json["code"]) == (503, "outcome_unknown")
            assert int(answer.headers["retry-after"]) >= 1
        await assert_adds_up(ask, 20, shed=20)

    run(scenario, AwayLog({"user-feedback": 4}))


class AwayKeys(MemoryKeys):
    def data_key(self, subject: str) -> DataKey:
        raise StoreUnavailable("the store is away")


def test_without_the_key_store_comments_wait_and_clicks_go_on() -> None:
    log = new_log()

    async def scenario(ask: Ask) -> None:
        answer = await ask("/v1/feedback", raw(said(1, comment="hm", subject="me")))
        assert (answer.status, answer.json["code"]) == (503, "unavailable")
        assert (await ask("/v1/feedback", raw(said(2, subject="me")))).status == 200
        await assert_adds_up(ask, 2, accepted=1, shed=1)

    run(scenario, log, keys=AwayKeys())


class BrokenKeys(MemoryKeys):
    """A fault that quotes what it was given."""

    def data_key(self, subject: str) -> DataKey:
        words = "my address is 1 Elm Street"
        raise RuntimeError(f"{words} {subject}")


def test_a_fault_of_ours_is_logged_by_its_place_and_without_what_anybody_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def scenario(ask: Ask) -> None:
        answer = await ask(
            "/v1/feedback", raw(said(1, comment="my address is 1 Elm Street", subject="ada@example.org"))
        )
        assert (answer.status, answer.json["code"]) == (500, "internal")
        assert "Elm" not in answer.body.decode()

    run(scenario, new_log(), keys=BrokenKeys())
    logged = capsys.readouterr().err
    assert "gateway.failed" in logged
    assert "RuntimeError" in logged
    assert "data_key" in logged
    assert not [word for word in ("Elm Street", "ada@example.org", SECRET.decode()) if word in logged]


class HangingKeys(MemoryKeys):
    """A store that answers when it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def data_key(self, subject: str) -> DataKey:
        assert self.go.wait(TIMEOUT_S)
        return super().data_key(subject)


def test_a_key_store_that_hangs_is_waited_for_until_the_deadline_only() -> None:
    async def main() -> None:
        log, keys = new_log(), HangingKeys()
        try:
            async with running(make_app(log, keys, SECRET, config=config(deadline_s=0.3))) as ask:
                late = await ask("/v1/feedback", raw(said(1, comment="why", subject="ann")))
                assert (late.status, late.json["code"]) == (503, "unavailable")
                assert late.headers["retry-after"]
                assert (await ask("/v1/feedback", raw(said(2)))).status == 200
                assert "user-feedback" in (await ask("/metrics", method="GET")).body.decode()
                keys.go.set()
        finally:
            keys.go.set()
        assert [event.feedback_id for event in events(log)] == ["f2"]

    asyncio.run(main())


def test_over_the_quota_it_is_429_with_retry_after() -> None:
    log = new_log()

    async def scenario(ask: Ask) -> None:
        answers = [await ask("/v1/feedback", raw(said(n), said(n + 10)), NDJSON) for n in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 429]
        assert int(answers[2].headers["retry-after"]) >= 1
        await assert_adds_up(ask, 6, accepted=4, shed=2)

    run(scenario, log, access=OpenAccess(rate=0.01, burst=4), quotas=LocalQuotas())


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"x" * 2_000, JSON, 413, "too_large"),
        ([b"x" * 600, b"y" * 600], JSON, 413, "too_large"),
        (b"{}", {**JSON, "content-encoding": "br"}, 415, "encoding_unknown"),
        (b"{}", {**JSON, "content-encoding": "gzip"}, 400, "encoding_invalid"),
        (b"{}", {"content-type": "application/xml"}, 415, "media_type_unknown"),
        (b"{}", JSON, 400, "missing_field"),
        (b"", JSON, 400, "malformed"),
    ],
)
def test_c76_a_request_that_is_not_understood_is_one_refusal(
    body: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    async def scenario(ask: Ask) -> None:
        answer = await ask("/v1/feedback", body, headers)
        assert (answer.status, answer.json["code"]) == (status, code)
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json["request_id"] == answer.headers["x-request-id"]
        await assert_adds_up(ask, 1, refused=1)

    run(scenario, new_log(), config=config(max_body_bytes=1_000))


def test_a_body_in_pieces_is_read_and_one_that_never_comes_is_given_up() -> None:
    log = new_log()

    async def scenario(ask: Ask) -> None:
        body = raw(said(1))
        assert (await ask("/v1/feedback", [body[:5], body[5:9], body[9:]])).status == 200
        slow = await ask("/v1/feedback", [body[:5], body[5:]], stalls=True)
        assert (slow.status, slow.json["code"]) == (408, "timed_out")
        assert slow.headers["connection"] == "close"
        await assert_adds_up(ask, 2, accepted=1, refused=1)

    run(scenario, log, config=config(body_timeout_s=0.3))


def test_pages_of_known_origins_may_read_the_answers() -> None:
    page = "https://app.example.com"

    async def scenario(ask: Ask) -> None:
        before = await ask("/v1/feedback", headers={"origin": page}, method="OPTIONS")
        assert before.status == 204
        assert before.headers["access-control-allow-origin"] == page
        answer = await ask("/v1/feedback", raw(said(1)), {**JSON, "origin": page})
        assert answer.headers["access-control-allow-origin"] == page
        other = await ask("/v1/feedback", raw(said(2)), {**JSON, "origin": "https://evil.example"})
        assert other.status == 403
        assert "access-control-allow-origin" not in other.headers

    run(scenario, new_log(), access=OpenAccess(origins=(page,)))


def test_pages_beside_the_events() -> None:
    async def scenario(ask: Ask) -> None:
        assert (await ask("/healthz", method="GET")).status == 204
        assert (await ask("/readyz", method="GET")).status == 200
        assert (await ask("/healthz", method="HEAD")).body == b""
        head = await ask("/metrics", method="HEAD")
        assert (head.status, head.body, "content-length" in head.headers) == (200, b"", False)
        assert (await ask("/nowhere", method="GET")).json["code"] == "not_found"
        wrong = await ask("/v1/feedback", method="GET")
        assert (wrong.status, wrong.headers["allow"]) == (405, "POST, OPTIONS")
        assert (await ask("/metrics", b"", method="POST")).headers["allow"] == "GET, HEAD, OPTIONS"

    run(scenario, new_log())


def test_told_to_stop_it_takes_nothing_new() -> None:
    log = new_log()

    async def whole() -> None:
        app = make_app(log, MemoryKeys(), SECRET)
        async with running(app) as ask:
            assert (await ask("/v1/feedback", raw(said(1)))).status == 200
            app.stopping()
            await asyncio.sleep(0)
            answer = await ask("/v1/feedback", raw(said(2)))
            assert (answer.status, answer.json["code"]) == (503, "stopping")
        assert [event.feedback_id for event in events(log)] == ["f1"]

    asyncio.run(whole())
