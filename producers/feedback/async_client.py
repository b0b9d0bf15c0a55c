"""`AsyncFeedbackClient`: the same for asyncio, sent by a task of the running loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rollwire.producers.feedback.answers import Answer
from rollwire.producers.feedback.core import Core
from rollwire.producers.feedback.delivery import FeedbackCounts, OnRefused, Post, warn
from rollwire.producers.feedback.event import Value, When
from rollwire.schemas.errors import DeadlineExceeded, FeedbackError, GatewayRefused, RollwireError

if TYPE_CHECKING:
    import httpx


class AsyncFeedbackClient:
    """`FeedbackClient` for asyncio: same settings, same promises. Of one event loop.

        async with AsyncFeedbackClient("https://feedback.example.com", key="rw_...") as feedback:
            await feedback.send(rollout_id, "thumb", 1)

    The settings are those of `FeedbackClient`. Raises `ConfigError` for one that cannot be.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        key: str | None = None,
        spool: str | os.PathLike[str] | None = None,
        on_refused: OnRefused | None = None,
        max_bytes: int = 64 * 1024 * 1024,
        batch: int = 500,
        linger_s: float = 0.1,
        timeout_s: float = 10.0,
        fsync_s: float | None = 1.0,
    ) -> None:
        self._core = Core(
            url,
            key,
            spool,
            on_refused=on_refused,
            max_bytes=max_bytes,
            batch=batch,
            linger_s=linger_s,
            timeout_s=timeout_s,
            fsync_s=fsync_s,
        )
        # 0.2 s, once a process: here, where a program starts, and not in its loop.
        import httpcore  # noqa: F401  which httpx imports when it makes a client
        import httpx

        self._tls = httpx.create_ssl_context()
        self._waits_for_disk = spool is not None and fsync_s == 0
        self._task: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self._moved = asyncio.Event()  # set, and a new one made, whenever something may have been settled
        self._closed = False
        self._ended = False

    async def send(
        self,
        rollout_id: str,
        signal: str,
        value: Value | None = None,
        *,
        label: str | None = None,
        comment: str | None = None,
        subject: str | None = None,
        happened_at: When | None = None,
        feedback_id: str | None = None,
    ) -> str:
        """As `FeedbackClient.send`: takes one piece of feedback and gives its id, without waiting for the network."""
        made, line = self._core.line(
            rollout_id, signal, value, label, comment, subject, happened_at, feedback_id
        )
        if self._closed:
            raise FeedbackError("this client is closed: make a new one")
        if self._waits_for_disk:
            await asyncio.to_thread(self._core.put, line)
        else:
            self._core.put(line)
        self._start()
        self._woken.set()
        return made

    async def flush(self, timeout_s: float = 30.0) -> None:
        """As `FeedbackClient.flush`: returns when the gateway answered on everything that was sent before.

        Raises `DeadlineExceeded` or `GatewayRefused`; what waits is kept in both cases.
        """
        core = self._core
        deadline = time.monotonic() + timeout_s
        if core.spooled or core.added():
            self._start()
        while not core.adopted and await self._movement(deadline):
            pass
        mark = core.mark()
        core.hurry()
        self._woken.set()
        while not core.flushed(mark):
            if not await self._movement(deadline):
                raise core.not_flushed(timeout_s)

    def counts(self) -> FeedbackCounts:
        """What became of this client's events so far."""
        return self._core.counts()

    async def close(self, timeout_s: float = 5.0) -> None:
        """As `FeedbackClient.close`. Raises `FeedbackError` where events are lost."""
        if (error := await self._close(timeout_s)) is not None:
            raise error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Who was just told that the gateway is away is not kept waiting once more.
        lost = await self._close(0.0 if isinstance(error, DeadlineExceeded | GatewayRefused) else 5.0)
        if lost is not None and error is None:
            raise lost
        if lost is not None:
            warn(str(lost))

    def _start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="feedback")

    async def _movement(self, deadline: float) -> bool:
        """Waits until something may have been settled; False at the deadline."""
        moved, task = self._moved, self._task
        if task is not None and task.done():
            raise FeedbackError(f"feedback is no longer sent: {task.exception()!r}") from task.exception()
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        with contextlib.suppress(TimeoutError):
            # A second at most: the task may have ended without a word.
            await asyncio.wait_for(moved.wait(), min(left, 1.0))
        return True

    async def _close(self, timeout_s: float) -> FeedbackError | None:
        if self._closed:
            return None
        self._closed = True
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(RollwireError):  # what waits is told below
            await self.flush(timeout_s)
        self._ended = True
        self._woken.set()
        if self._task is not None:
            # The task ends by itself, unless a request is under way: that is given up, and its events are sent again.
            done, _ = await asyncio.wait([self._task], timeout=max(0.1, deadline - time.monotonic()))
            if not done:
                self._task.cancel()
                await asyncio.wait([self._task], timeout=1.0)
        return self._core.close()

    async def _run(self) -> None:
        import httpx

        core = self._core
        async with httpx.AsyncClient(timeout=core.timeout_s, headers=core.headers, verify=self._tls) as http:
            while not self._ended:
                self._woken.clear()
                now = time.monotonic()
                if core.house_due(now):
                    await asyncio.to_thread(core.keep_house, now)
                    self._move()
                post, wait_s = core.next(now)
                if post is not None:
                    await self._post(http, post)
                    self._move()
                    continue
                self._move()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), wait_s)

    def _move(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def _post(self, http: httpx.AsyncClient, post: Post) -> None:
        import httpx

        try:
            response = await http.post(self._core.url, content=post.body, headers=post.headers)
        except httpx.HTTPError as error:
            why = f"the gateway at {self._core.url} gave no answer: {error or type(error).__name__}"
            self._core.failed(why, time.monotonic(), random.random())
            return
        answer = Answer(response.status_code, response.content, response.headers.get("retry-after"))
        self._core.answered(answer, time.monotonic(), random.random())
