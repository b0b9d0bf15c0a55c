"""Live traffic on the in-memory log, engine and keys: what is answered is recorded, sealed, and follows the weights."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import httpx
import numpy as np
import pytest

from rollwire.producers.emit import decode_record
from rollwire.producers.environments.countdown import END_ID, Countdown, encode_text
from rollwire.producers.serving.answer import Answer, Question
from rollwire.producers.serving.config import ServingConfig
from rollwire.producers.serving.front import make_front
from rollwire.producers.serving.outcomes import of_expressions
from rollwire.producers.serving.serving import Serving, ServingReport
from rollwire.schemas.errors import Erased, LogUnavailable
from rollwire.schemas.pseudonyms import pseudonym_of
from rollwire.schemas.records import ProductionRollout
from rollwire.streams.seams.engine_memory import MemoryEngine
from rollwire.streams.seams.keys_memory import MemoryKeys
from rollwire.streams.seams.log import Outgoing, Record, Writer
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.sealing import open_field
from rollwire.streams.seams.weights_memory import MemoryWeights

LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"
SECRET = bytes(range(32))
PROMPT = "7 3 12=48 "
PATIENCE_S = 30.0


def pseudonym(subject: str) -> str:
    return pseudonym_of(SECRET, "default", subject)


class Reply:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.durable: bool | None = None
        self.has_answer = threading.Event()
        self.settled = threading.Event()

    def answered(self, answer: Answer | None) -> None:
        self.answer = answer
        self.has_answer.set()

    def recorded(self, durable: bool) -> None:
        self.durable = durable
        self.settled.set()


class FlakyLog(MemoryLog):
    """Its writers fail until told otherwise."""

    def __init__(self, topics: dict[str, int]) -> None:
        super().__init__(topics)
        self.away = threading.Event()
        self.failed = threading.Event()

    def writer(self) -> Writer:
        return _FlakyWriter(self, super().writer())


class _FlakyWriter:
    def __init__(self, log: FlakyLog, inner: Writer) -> None:
        self._log = log
        self._inner = inner

    def write(self, records: Sequence[Outgoing], timeout_s: float = 30.0) -> None:
        if self._log.away.is_set():
            self._log.failed.set()
            raise LogUnavailable("the broker is away")
        self._inner.write(records, timeout_s)

    def close(self) -> None:
        self._inner.close()


class World:
    def __init__(self, config: ServingConfig, end_bias: float) -> None:
        self.log = FlakyLog({"production-rollouts": 4})
        self.engine = MemoryEngine(vocab_size=20, end_id=END_ID, end_bias=end_bias)
        self.weights = MemoryWeights()
        self.keys = MemoryKeys()
        self.countdown = Countdown()
        self.config = config
        self.serving = Serving(
            self.log,
            self.engine,
            self.weights,
            self.keys,
            config,
            model="policy",
            lineage=LINEAGE,
            end_id=END_ID,
            classify=of_expressions(self.countdown, END_ID),
        )
        self.stop = threading.Event()
        self.report: ServingReport | None = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self.report = self.serving.run(self.stop)

    def ask(self, subject: str = "ada") -> Reply:
        reply = Reply()
        assert self.serving.ask(Question(encode_text(PROMPT), pseudonym(subject)), reply)
        return reply

    def records(self) -> list[Record]:
        return list(scan(self.log, ("production-rollouts",)))

    def rollouts(self) -> dict[str, ProductionRollout]:
        events = [decode_record(record) for record in self.records()]
        return {event.rollout_id: event for event in events if isinstance(event, ProductionRollout)}

    def tokens_of(self, rollout: ProductionRollout) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        assert rollout.sealed is not None
        plain = open_field(self.keys, rollout.sealed, rollout.rollout_id, "token_ids", rollout.token_ids)
        return np.frombuffer(plain, "<u4")

    def end(self) -> ServingReport:
        self.stop.set()
        self.thread.join(PATIENCE_S)
        assert self.report is not None
        return self.report


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < deadline
        pause.wait(0.005)


@contextmanager
def serving(
    config: ServingConfig | None = None, *, version: int | None = 0, end_bias: float = 1.0
) -> Iterator[World]:
    world = World(config or ServingConfig(), end_bias)
    if version is not None:
        world.weights.offer(version, {})
    world.thread.start()
    try:
        if version is not None:
            until(lambda: world.serving.version == version)
        yield world
    finally:
        world.stop.set()
        world.thread.join(PATIENCE_S)
        assert not world.thread.is_alive()


def test_every_answer_is_recorded_and_sealed() -> None:
    with serving() as world:
        replies = [world.ask(f"person-{i % 3}") for i in range(40)]
        for reply in replies:
            assert reply.settled.wait(PATIENCE_S)
            assert reply.durable
        rollouts = world.rollouts()
        for i, reply in enumerate(replies):
            assert reply.answer is not None
            rollout = rollouts.pop(reply.answer.rollout_id)
            assert rollout.sealed is not None
            assert rollout.sealed.subject == pseudonym(f"person-{i % 3}")
            tokens_T = world.tokens_of(rollout)
            assert world.countdown.decode(tokens_T[: len(PROMPT)].astype(np.int64)) == PROMPT
            said_N = tokens_T[len(PROMPT) :]
            assert said_N[said_N != END_ID].tolist() == reply.answer.sampled_ids.tolist()
            assert (rollout.group_size, rollout.tenant, rollout.task) == (1, "default", "")
            assert rollout.outcome in {"answered", "unreadable", "cut_off"}
            assert rollout.loss_mask == bytes(len(PROMPT)) + bytes([1]) * said_N.size
        assert not rollouts
        plain = encode_text(PROMPT).astype("<u4").tobytes()
        assert all(plain not in (record.value or b"") for record in world.records())
        report = world.end()
        assert (report.answered, report.written, report.refused) == (40, 40, 0)


def test_an_erased_person_s_answers_open_no_more() -> None:
    with serving() as world:
        replies = [world.ask("ada"), world.ask("bob")]
        assert all(reply.settled.wait(PATIENCE_S) for reply in replies)
        world.keys.destroy(pseudonym("ada"))
        ada, bob = (world.rollouts()[r.answer.rollout_id] for r in replies if r.answer)
        with pytest.raises(Erased):
            world.tokens_of(ada)
        assert world.tokens_of(bob).size


def test_running_answers_carry_the_versions_that_sampled_them() -> None:
    # An end token this unlikely keeps answers running for as long as they may.
    with serving(ServingConfig(max_new_tokens=4_000), end_bias=-50.0) as world:
        replies = [world.ask() for _ in range(8)]
        until(lambda: world.engine.running == 8)
        world.weights.offer(1, {})
        assert all(reply.settled.wait(PATIENCE_S) for reply in replies)
        versions = {tuple(span.version for span in r.spans) for r in world.rollouts().values()}
        assert versions == {(0, 1)}
        report = world.end()
        assert report.swaps == 2
        assert report.version == 1


def test_an_answer_outlives_a_broker_that_is_away() -> None:
    with serving() as world:
        world.log.away.set()
        reply = world.ask()
        assert reply.has_answer.wait(PATIENCE_S)
        assert world.log.failed.wait(PATIENCE_S)
        assert not reply.settled.is_set()
        assert not world.records()
        world.log.away.clear()
        assert reply.settled.wait(PATIENCE_S)
        assert reply.durable
        assert reply.answer is not None
        assert list(world.rollouts()) == [reply.answer.rollout_id]


def test_what_is_open_is_bounded_and_a_stop_takes_nothing_up() -> None:
    with serving(ServingConfig(max_open=3)) as world:
        world.log.away.set()
        replies = [world.ask() for _ in range(3)]
        assert not world.serving.ask(Question(encode_text(PROMPT), pseudonym("eve")), Reply())
        assert all(reply.has_answer.wait(PATIENCE_S) for reply in replies)
        assert not world.serving.ask(Question(encode_text(PROMPT), pseudonym("eve")), Reply())
        world.log.away.clear()
        assert all(reply.settled.wait(PATIENCE_S) for reply in replies)
        world.ask()
        world.end()
        assert not world.serving.ask(Question(encode_text(PROMPT), pseudonym("eve")), Reply())


def exchange(world: World, *requests: tuple[str, str, bytes]) -> list[httpx.Response]:
    """(method, path, body) each, in order."""

    async def run() -> list[httpx.Response]:
        app = make_front(world.serving, world.countdown, pseudonym, world.config)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://serving") as client:
            return [await client.request(method, path, content=body) for method, path, body in requests]

    return asyncio.run(run())


def test_the_front_gives_an_answer_and_the_id_of_its_rollout() -> None:
    with serving() as world:
        body = b'{"prompt": "7 3 12=48 ", "subject": "ada"}'
        answered, ready = exchange(world, ("POST", "/v1/answers", body), ("GET", "/readyz", b""))
        told = answered.json()
        rollout = world.rollouts()[told["rollout_id"]]
        said_N = world.tokens_of(rollout)[len(PROMPT) :].astype(np.int64)
        assert told["answer"] == world.countdown.decode(said_N[said_N != END_ID])
        assert told["recorded"] is True
        assert told["version"] == 0
        assert answered.headers["x-request-id"] == told["request_id"]
        assert (ready.status_code, ready.text) == (200, "version 0\n")


def test_the_front_says_when_an_answer_is_not_in_the_log_yet() -> None:
    with serving(ServingConfig(record_s=0.05)) as world:
        world.log.away.set()
        (answered,) = exchange(world, ("POST", "/v1/answers", b'{"prompt": "1", "subject": "ada"}'))
        assert answered.status_code == 200
        assert answered.json()["recorded"] is False
        world.log.away.clear()
        until(lambda: list(world.rollouts()) == [answered.json()["rollout_id"]])


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid"),
        (b"[1]", 400, "invalid"),
        (b'{"prompt": "1", "subject": 5}', 400, "invalid"),
        (b'{"prompt": "1", "subject": "a", "more": 1}', 400, "invalid"),
        (b'{"prompt": "\\ud800", "subject": "a"}', 400, "invalid"),
        (b'{"prompt": "1", "subject": ""}', 400, "id_invalid"),
        (b'{"prompt": "hello", "subject": "a"}', 400, "prompt_invalid"),
        (b'{"prompt": "", "subject": "a"}', 400, "prompt_invalid"),
        (b'{"prompt": "' + b"1" * 2_000 + b'", "subject": "a"}', 400, "prompt_invalid"),
        (b" " * 70_000, 413, "too_large"),
        (b"[" * 5_000, 400, "invalid"),
    ],
)
def test_the_front_refuses_what_is_no_question(body: bytes, status: int, code: str) -> None:
    with serving() as world:
        (refused,) = exchange(world, ("POST", "/v1/answers", body))
        assert (refused.status_code, refused.json()["code"]) == (status, code)
        assert refused.json()["request_id"] == refused.headers["x-request-id"]
        assert not world.records()


def test_the_front_is_not_ready_without_a_version() -> None:
    with serving(version=None) as world:
        body = b'{"prompt": "1", "subject": "ada"}'
        asked, ready = exchange(world, ("POST", "/v1/answers", body), ("GET", "/readyz", b""))
        assert (asked.status_code, asked.json()["code"]) == (503, "not_ready")
        assert ready.status_code == 503
        assert asked.headers["retry-after"] == "1"
