"""`FeedbackClient`: feedback from any thread, sent by one in the background."""

from __future__ import annotations

import atexit
import os
import random
import threading
import time
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rollwire.producers.feedback.answers import Answer
from rollwire.producers.feedback.core import Core
from rollwire.producers.feedback.delivery import FeedbackCounts, OnRefused, Post, warn
from rollwire.producers.feedback.event import Value, When
from rollwire.schemas.errors import DeadlineExceeded, FeedbackError, GatewayRefused, RollwireError

if TYPE_CHECKING:
    import httpx

_EXIT_S = 2.0  # what a client that nobody closed may take at the end of the process

_open_clients: weakref.WeakSet[FeedbackClient] = weakref.WeakSet()


class FeedbackClient:
    """Sends feedback to a gateway, in the background. Thread-safe, and goes on in the child of a fork.

        with FeedbackClient("https://feedback.example.com", key="rw_...", spool="/var/lib/app/feedback") as feedback:
            feedback.send(rollout_id, "thumb", 1)

    `send` never waits for the network. What it took is sent in batches and, until the gateway said that the log has it, again and
    again under the same id, so nothing is lost by a retry and nothing counts twice. With a `spool` it also survives the end of the
    process; without one, what waits is in memory.

    Parameters
    ----------
    url
        The gateway's address, as https://feedback.example.com; by default $ROLLWIRE_FEEDBACK_URL.
    key
        An API key with the scope feedback:write; by default $ROLLWIRE_FEEDBACK_KEY. A gateway on this machine may need none.
    spool
        A folder on a local disk, made if need be. Processes may share it if they send to the same gateway for the same tenant:
        each sends what an ended one left. None: memory.
    on_refused
        Called in the background with every event that the gateway refuses for good; by default it is logged.
    max_bytes
        How much may wait. Above, `send` raises `SpoolFull`; nothing that waits is dropped.
    batch
        Events in one request at most.
    linger_s
        How long the first event waits for company.
    timeout_s
        How long the gateway may take to connect, and to answer.
    fsync_s
        How soon an event in the spool is forced to disk, so that it survives the machine's end as well as the process's.
        0: before `send` returns; None: when the system pleases.

    Raises `ConfigError` for a setting that cannot be.
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
        # 0.2 s, once a process. Here and not in the thread: a fork in the middle would leave the child half a module, or a
        # lock of OpenSSL's that nobody holds any more.
        import httpcore  # noqa: F401  which httpx imports when it makes a client
        import httpx

        self._tls = httpx.create_ssl_context()
        self._begin()
        _open_clients.add(self)

    def send(
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
        """Takes one piece of feedback and gives its id. Does not wait for the network.

        Parameters
        ----------
        rollout_id
            The answer that it is about, as the serving side gave it: "<group id>.<index>".
        signal
            One of the gateway's rules: "thumb", "accept", "edit_survival", "rating", "comment", ...
        value
            A number or a boolean, as the signal demands.
        label
            A word instead, for signals that have words.
        comment
            Free text. It is encrypted with the person's key before it is stored.
        subject
            The person, by an id of yours. Stored as a pseudonym; an erasure names it.
        happened_at
            When it happened: an aware datetime, or seconds since 1970. By default now.
        feedback_id
            The idempotency key, where you have one (the click's id, say). By default a new UUIDv7. Give `happened_at` with it
            where you may call twice: the same id with another time is another content, and refused (conflicting_repeat).

        Raises `Refused` for what no gateway would take, `SpoolFull` where no more may wait, `FeedbackError` once closed.
        """
        made, line = self._core.line(
            rollout_id, signal, value, label, comment, subject, happened_at, feedback_id
        )
        if self._closed:
            raise FeedbackError("this client is closed: make a new one")
        self._core.put(line)
        with self._changed:
            self._start()
            self._wake()
        return made

    def flush(self, timeout_s: float = 30.0) -> None:
        """Waits until the gateway answered on every event that was sent before, those found in the spool included.

        Refused ones count as answered: see `on_refused` and `counts`. Raises `DeadlineExceeded` when `timeout_s` has passed,
        `GatewayRefused` where the gateway turns every request away (the key, say); what waits is kept in both cases.
        """
        self._wait_flushed(time.monotonic() + timeout_s, timeout_s)

    def counts(self) -> FeedbackCounts:
        """What became of this client's events so far."""
        return self._core.counts()

    def close(self, timeout_s: float = 5.0) -> None:
        """Flushes as far as `timeout_s` allows, then ends. What still waits stays in the spool for the next process.

        Raises `FeedbackError` where events are lost: they were not acknowledged, and there is no spool.
        """
        if (error := self._close(timeout_s)) is not None:
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Who was just told that the gateway is away is not kept waiting once more.
        lost = self._close(0.0 if isinstance(error, DeadlineExceeded | GatewayRefused) else 5.0)
        if lost is not None and error is None:
            raise lost
        if lost is not None:
            warn(str(lost))

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._ended = False
        self._wakes = 0
        self._broken: BaseException | None = None

    def _start(self) -> None:
        """Called with the lock held. The thread begins with the first event: a client that only waits costs nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="feedback", daemon=True)
            self._thread.start()

    def _wait_flushed(self, deadline: float, timeout_s: float) -> None:
        core = self._core
        with self._changed:
            if core.spooled or core.added():
                self._start()
            while not core.adopted and time.monotonic() < deadline and self._broken is None:
                self._changed.wait(max(0.0, deadline - time.monotonic()))
            mark = core.mark()
            core.hurry()
            self._wake()
            while not core.flushed(mark):
                if self._broken is not None:
                    raise FeedbackError(f"feedback is no longer sent: {self._broken!r}") from self._broken
                left = deadline - time.monotonic()
                if left <= 0:
                    raise core.not_flushed(timeout_s)
                self._changed.wait(min(left, 1.0))

    def _wake(self) -> None:
        """Called with the lock held."""
        self._wakes += 1
        self._changed.notify_all()

    def _close(self, timeout_s: float) -> FeedbackError | None:
        if self._closed:
            return None
        deadline = time.monotonic() + timeout_s
        self._closed = True
        try:
            if self._core.added() or self._thread is not None:
                self._wait_flushed(deadline, timeout_s)
        except RollwireError:
            pass  # what waits is told below
        with self._changed:
            self._ended = True
            self._wake()
        if self._thread is not None:
            # A request that is under way is given up when its own time is over; the thread holds nothing that waits.
            self._thread.join(max(0.1, deadline - time.monotonic()))
            if self._thread.is_alive():
                warn(f"a request is still under way after {timeout_s:g} s: its events are sent again")
        _open_clients.discard(self)
        return self._core.close()

    def _run(self) -> None:
        import httpx

        core = self._core
        try:
            with httpx.Client(timeout=core.timeout_s, headers=core.headers, verify=self._tls) as http:
                while not self._ended:
                    with self._changed:
                        wakes = self._wakes
                        self._changed.notify_all()  # whoever flushes looks again
                    now = time.monotonic()
                    if core.house_due(now):
                        core.keep_house(now)
                    post, wait_s = core.next(now)
                    if post is not None:
                        self._post(http, post)
                        continue
                    with self._changed:
                        if wakes == self._wakes:
                            self._changed.wait(wait_s)
        except Exception as error:  # noqa: BLE001  a thread's edge: who flushes must learn that nothing is sent any more
            warn(f"feedback is no longer sent: {error!r}")
            with self._changed:
                self._broken = error
                self._changed.notify_all()

    def _post(self, http: httpx.Client, post: Post) -> None:
        import httpx

        try:
            response = http.post(self._core.url, content=post.body, headers=post.headers)
        except httpx.HTTPError as error:
            why = f"the gateway at {self._core.url} gave no answer: {error or type(error).__name__}"
            self._core.failed(why, time.monotonic(), random.random())
            return
        answer = Answer(response.status_code, response.content, response.headers.get("retry-after"))
        self._core.answered(answer, time.monotonic(), random.random())

    def _forked(self) -> None:
        closed = self._closed
        self._begin()
        self._closed = closed
        self._core.begin()


@atexit.register
def _close_all() -> None:
    for client in list(_open_clients):
        if (lost := client._close(_EXIT_S)) is not None:
            warn(str(lost))


def _after_fork() -> None:
    for client in list(_open_clients):
        client._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
