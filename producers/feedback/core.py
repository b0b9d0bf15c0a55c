"""What both clients are, but for how they wait: the settings, the form of an event, and what to do next at a given time."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from rollwire.producers.feedback.answers import Answer
from rollwire.producers.feedback.delivery import Delivery, FeedbackCounts, OnRefused, Post, warn
from rollwire.producers.feedback.event import Value, When, feedback_line
from rollwire.producers.feedback.spool import Spool
from rollwire.producers.feedback.waiting import MemoryWaiting, Waiting
from rollwire.schemas.errors import ConfigError, DeadlineExceeded, FeedbackError, GatewayRefused

URL_VARIABLE: Final = "ROLLWIRE_FEEDBACK_URL"
KEY_VARIABLE: Final = "ROLLWIRE_FEEDBACK_KEY"
PATH: Final = "/v1/feedback"

_HERE: Final = ("127.0.0.1", "::1", "localhost")
_ADOPT_S: Final = 15.0  # how often is looked for what other processes left
_IDLE_S: Final = 60.0


class Next(NamedTuple):
    """Post this, or come back in so many seconds or when something was added."""

    post: Post | None
    wait_s: float


class Mark(NamedTuple):
    added: int  # events
    begun: int  # requests


class Core:
    """`put` from any thread; `next`, `answered`, `failed` and `keep_house` from the one sender."""

    def __init__(
        self,
        url: str | None,
        key: str | None,
        spool: str | os.PathLike[str] | None,
        *,
        on_refused: OnRefused | None,
        max_bytes: int,
        batch: int,
        linger_s: float,
        timeout_s: float,
        fsync_s: float | None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Raises `ConfigError`, for a folder that cannot be written too."""
        self.url = _address(url or environment.get(URL_VARIABLE))
        self.headers = _headers(key or environment.get(KEY_VARIABLE), self.url)
        for name, given, least in (("max_bytes", max_bytes, 128 * 1024), ("batch", batch, 1)):
            if given < least:
                raise ConfigError(f"{name}={given} is below {least}")
        for name, seconds in (("linger_s", linger_s), ("timeout_s", timeout_s), ("fsync_s", fsync_s or 0.0)):
            if not 0 <= seconds < 3_600 or (name == "timeout_s" and not seconds):
                raise ConfigError(f"{name}={seconds} is not a number of seconds")
        self.timeout_s = timeout_s
        self.spooled = spool is not None
        self._batch = batch
        self._linger_s = linger_s
        self._on_refused = on_refused
        self._sync_s = fsync_s if self.spooled and fsync_s else None
        self._waiting: Waiting = (
            MemoryWaiting(max_bytes)
            if spool is None
            else Spool(Path(spool), max_bytes, fsync_each=fsync_s == 0)
        )
        self._max_bytes = max_bytes
        self.begin()

    def begin(self) -> None:
        """Also in the child of a fork: what waited is the parent's to send."""
        if isinstance(self._waiting, MemoryWaiting):
            self._waiting = MemoryWaiting(self._max_bytes)
        self.delivery = Delivery(self._waiting, self._batch, self._on_refused)
        self._since: float | None = None  # when the oldest event that was not posted yet was added
        self._adopted_at: float | None = None
        self._synced_at = time.monotonic()
        self._hurry = False
        self._told = ""

    def line(
        self,
        rollout_id: str,
        signal: str,
        value: Value | None,
        label: str | None,
        comment: str | None,
        subject: str | None,
        happened_at: When | None,
        feedback_id: str | None,
    ) -> tuple[str, bytes]:
        """Raises `Refused`."""
        return feedback_line(
            rollout_id,
            signal,
            value,
            label=label,
            comment=comment,
            subject=subject,
            happened_at=happened_at,
            feedback_id=feedback_id,
            now_us=time.time_ns() // 1_000,
            random_bits=int.from_bytes(os.urandom(10), "big"),
        )

    def put(self, line: bytes) -> None:
        """Raises `SpoolFull`."""
        self._waiting.append(line)
        if self._since is None:
            self._since = time.monotonic()

    def hurry(self) -> None:
        """Send what waits now."""
        self._hurry = True

    @property
    def adopted(self) -> bool:
        """Whether what other processes left was looked for."""
        return not self.spooled or self._adopted_at is not None

    def house_due(self, now: float) -> bool:
        """Whether `keep_house` has something to do; it may take as long as a disk does."""
        return self.spooled and (self._adopt_in(now) <= 0 or self._sync_in(now) <= 0)

    def keep_house(self, now: float) -> None:
        if self._adopt_in(now) <= 0:
            self._waiting.adopt()
            self._adopted_at = now  # after: whoever flushes waits for it
        if self._sync_in(now) <= 0:
            self._synced_at = now
            self._waiting.sync()

    def next(self, now: float) -> Next:
        courier = self.delivery.courier
        hurry, self._hurry = self._hurry, False
        if hurry:
            courier.hurry()
        wait_s = courier.wait_s(now)
        if wait_s > 0:
            return Next(None, min(wait_s, self._house_in(now)))
        if courier.idle and not hurry and self._since is not None:
            added, settled = self._waiting.count()
            linger_s = self._since + self._linger_s - now
            if linger_s > 0 and added - settled < self._batch:
                return Next(None, min(linger_s, self._house_in(now)))
        self._since = None
        post = self.delivery.next_post()
        return Next(post, 0.0 if post else self._house_in(now))

    def answered(self, answer: Answer, now: float, chance: float) -> None:
        self.delivery.answered(answer, now, chance)
        self._tell()

    def failed(self, why: str, now: float, chance: float) -> None:
        self.delivery.failed(why, now, chance)
        self._tell()

    def added(self) -> int:
        return self._waiting.count().added

    def mark(self) -> Mark:
        """Where things stand: what `flushed` waits for."""
        return Mark(self.added(), self.delivery.courier.begun)

    def flushed(self, mark: Mark) -> bool:
        """Whether all events up to the mark are settled. Raises `GatewayRefused` where a request that began after it says
        that none will be."""
        if self.delivery.settled_up_to(mark.added):
            return True
        courier = self.delivery.courier
        if courier.closed and courier.ended > mark.begun:
            raise GatewayRefused(f"{courier.trouble}; {self._fate()}")
        return False

    def not_flushed(self, timeout_s: float) -> DeadlineExceeded:
        trouble = self.delivery.courier.trouble
        why = f" ({trouble})" if trouble else ""
        return DeadlineExceeded(f"no answer on all feedback within {timeout_s:g} s{why}; {self._fate()}")

    def counts(self) -> FeedbackCounts:
        return self.delivery.counts()

    def close(self) -> FeedbackError | None:
        """The error that says what is lost, if anything is."""
        pending = self.counts().pending
        trouble = self.delivery.courier.trouble
        self._waiting.close()
        if pending <= 0:
            return None
        if self.spooled:
            warn(f"{_events(pending)} in the spool for the next start: {trouble or 'there was no time'}")
            return None
        return FeedbackError(
            f"{'1 event is' if pending == 1 else f'{pending} events are'} lost, not acknowledged: "
            f"{trouble or 'there was no time'}. With a spool (a folder) they would wait for the next start"
        )

    def _fate(self) -> str:
        pending = self.counts().pending
        where = "in the spool" if self.spooled else "in memory"
        return f"{_events(pending)} {where} and will be sent again"

    def _tell(self) -> None:
        """A trouble is told once, not at every retry."""
        courier = self.delivery.courier
        if courier.trouble and courier.trouble != self._told:
            where = "in the spool" if self.spooled else "in memory"
            warn(f"{_events(self.counts().pending)} {where}: {courier.trouble}")
        self._told = courier.trouble

    def _adopt_in(self, now: float) -> float:
        if not self.spooled:
            return _IDLE_S
        return 0.0 if self._adopted_at is None else self._adopted_at + _ADOPT_S - now

    def _sync_in(self, now: float) -> float:
        return _IDLE_S if self._sync_s is None else self._synced_at + self._sync_s - now

    def _house_in(self, now: float) -> float:
        return max(0.0, min(self._adopt_in(now), self._sync_in(now)))


def _events(count: int) -> str:
    return "1 event waits" if count == 1 else f"{count} events wait"


def _address(url: str | None) -> str:
    if not url:
        raise ConfigError(
            f"where is the gateway? Give url=, or set {URL_VARIABLE}, as in https://feedback.example.com"
        )
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"url={url!r} is no http or https address, as https://feedback.example.com is")
    return url.rstrip("/").removesuffix(PATH) + PATH


def _headers(key: str | None, address: str) -> dict[str, str]:
    if not key:
        if urlsplit(address).hostname in _HERE:  # as `rollwire gateway --open`
            return {}
        raise ConfigError(f"no API key: give key=, or set {KEY_VARIABLE}")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError("the API key has blanks or odd characters: was it cut or quoted?")
    return {"authorization": f"Bearer {key}"}
