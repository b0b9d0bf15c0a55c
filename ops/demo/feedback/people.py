"""The crowd: asks a serving replica, thinks, and clicks through the gateway with the ordinary client."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path
from typing import Final, NamedTuple

import httpx
import msgspec
import structlog

from rollwire.ops.demo.feedback.preference import PeopleConfig, likes, react, think_s
from rollwire.producers.environments.countdown import Countdown, Problem
from rollwire.producers.feedback import FeedbackClient
from rollwire.producers.fleet import derive_seed
from rollwire.schemas.errors import RollwireError

_log = structlog.get_logger("rollwire.people")
_TOLD_EVERY_S: Final = 1.0
_FLUSH_S: Final = 6.0
_PAUSE_S: Final = 0.002


class Told(msgspec.Struct, frozen=True):
    """What the crowd knows of itself; the demo compares it with the topics."""

    asked: int
    answered: int
    unanswered: int  # refused, or the front was away
    clicks: int  # taken by the client
    accepted: int  # clicks that the gateway acknowledged
    refused: int  # clicks that the gateway refused
    pending: int  # clicks without an answer yet


class _Answered(msgspec.Struct, frozen=True):
    rollout_id: str
    answer: str


class Crowd(NamedTuple):
    """Where it goes, and what it is."""

    serving: str  # URL
    gateway: str  # URL
    key: str
    folder: Path  # the client's spool, and `people.json`
    config: PeopleConfig


def run_people(crowd: Crowd, stop: threading.Event) -> Told:
    """Asks and clicks until `stop`; then waits for what is under way, and leaves the rest in the spool."""
    with FeedbackClient(crowd.gateway, key=crowd.key, spool=crowd.folder / "spool", fsync_s=None) as feedback:
        run = _Run(crowd, feedback)
        asyncio.run(run.until(stop))
        try:
            feedback.flush(_FLUSH_S)
        except RollwireError as error:
            _log.warning("clicks_not_acknowledged", error=str(error))
        told = run.told()
    write_told(crowd.folder, told)
    _log.info("people_left", **msgspec.structs.asdict(told))
    return told


def write_told(folder: Path, told: Told) -> None:
    partial = folder / "people.json.partial"
    partial.write_bytes(msgspec.json.encode(told))
    partial.replace(folder / "people.json")


def read_told(folder: Path) -> Told:
    """Zeros where nobody has asked yet."""
    try:
        return msgspec.json.decode((folder / "people.json").read_bytes(), type=Told)
    except FileNotFoundError:
        return Told(0, 0, 0, 0, 0, 0, 0)


class _Run:
    def __init__(self, crowd: Crowd, feedback: FeedbackClient) -> None:
        self._crowd = crowd
        self._feedback = feedback
        self._countdown = Countdown()
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked = self._answered = self._unanswered = 0

    def told(self) -> Told:
        counts = self._feedback.counts()
        return Told(
            self._asked,
            self._answered,
            self._unanswered,
            counts.sent,
            counts.accepted,
            counts.refused,
            counts.pending,
        )

    @property
    def _waiting(self) -> int:
        return self._asked - self._answered - self._unanswered

    async def until(self, stop: threading.Event) -> None:
        config = self._crowd.config
        gaps = random.Random(derive_seed("gaps", config.seed))
        loop = asyncio.get_running_loop()
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=64)
        async with httpx.AsyncClient(base_url=self._crowd.serving, timeout=40.0, limits=limits) as http:
            due = told_at = loop.time()
            while not stop.is_set():
                now = loop.time()
                if now - told_at > _TOLD_EVERY_S:
                    told_at = now
                    write_told(self._crowd.folder, self.told())
                if due > now or self._waiting >= config.max_waiting:
                    await asyncio.sleep(min(max(due - now, _PAUSE_S), 0.1))
                    continue
                task = asyncio.create_task(self._one(http, self._asked))
                self._asked += 1
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                # Whoever falls behind does not ask all at once what was not asked.
                due = max(due + gaps.expovariate(config.questions_per_s), now - 1.0)
                await asyncio.sleep(0)
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=config.max_think_s + 1.0)

    async def _one(self, http: httpx.AsyncClient, number: int) -> None:
        config = self._crowd.config
        rng = random.Random(derive_seed("person", config.seed, number))
        task = self._countdown.reset(derive_seed("question", config.seed, number))
        person = f"person-{rng.randrange(config.people)}"
        question = {"prompt": self._countdown.decode(task.prompt_ids), "subject": person}
        try:
            response = await http.post("/v1/answers", json=question)
            response.raise_for_status()
            answered = msgspec.json.decode(response.content, type=_Answered)
        except httpx.HTTPError:
            self._unanswered += 1
            return
        self._answered += 1
        numbers = msgspec.json.decode(task.task, type=Problem).numbers
        clicks = react(likes(numbers, answered.answer), rng, config)
        if not clicks:
            return
        await asyncio.sleep(think_s(rng, config))
        for click in clicks:
            self._feedback.send(
                answered.rollout_id,
                click.signal,
                click.value,
                comment=click.comment,
                subject=person,
            )
