"""What the person in front of the demo sees: one live page, or lines where there is no terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec
from rich.console import Console
from rich.live import Live
from rich.panel import Panel

from rollwire.ops.demo.page import Frame, Shown, draw, line
from rollwire.ops.settings import RunSettings
from rollwire.ops.stack import StackInfo
from rollwire.schemas.records import TrainStep
from rollwire.streams.monitor.config import MonitorConfig
from rollwire.streams.monitor.page import Page, from_json
from rollwire.streams.seams.cache import Cache
from rollwire.streams.seams.cache_redis import RedisCache

PLAIN_EVERY_S = 5.0


class Watched(Protocol):
    """What follows a run."""

    @property
    def steps(self) -> Mapping[int, TrainStep]: ...

    def shown(self) -> Shown | None:
        """What the run is for, where that is not accuracy on held-out tasks."""


class View(Protocol):
    def phase(self, text: str) -> None:
        """What is going on now."""

    def say(self, text: str) -> None:
        """Something that a person should know; stays to be read."""

    def warm_start(self, progress_file: Path) -> None:
        """Shows how far the warm start is."""

    def attach(self, stack: StackInfo, prefix: str) -> None:
        """From now on the monitor's page can be read."""

    def show(self, watch: Watched) -> None:
        """Shows the run as it is now."""


class _View:
    def __init__(self, settings: RunSettings, began: float) -> None:
        self._settings = settings
        self._began = began
        self._phase = ""
        self._said: list[str] = []
        self._cache: Cache | None = None
        self._key = self._url_key = ""
        self._url: str | None = None
        self._page = Page()
        self._pace: tuple[int, float] | None = None  # step and time at which training was first seen

    def attach(self, stack: StackInfo, prefix: str) -> None:
        self._cache = RedisCache(stack.redis_url)
        monitor = MonitorConfig(prefix=prefix)
        self._key, self._url_key = monitor.page_key, monitor.url_key
        self._phase = "waiting for the first step"

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()

    def _frame(self, watch: Watched | None) -> Frame:
        done = max(watch.steps, default=0) if watch else 0
        now = time.monotonic()
        left = None
        if done and self._pace is None:
            self._pace = (done, now)
            self._phase = "training"
        if self._pace is not None and done > self._pace[0]:
            pace = (now - self._pace[1]) / (done - self._pace[0])
            left = pace * (self._settings.steps - done)
        if watch and done >= self._settings.steps:
            self._phase = "measuring the last version"
        kind = " · feedback" if self._settings.live else ""
        kind += ", control" if self._settings.trainer.control else ""
        return Frame(
            title=f"rollwire demo · {self._settings.environment}{kind} · seed {self._settings.seed}",
            phase=self._phase,
            environment=self._settings.environment,
            steps=self._settings.steps,
            steps_done=done,
            max_lag=self._settings.pack.max_lag_versions,
            elapsed_s=now - self._began,
            left_s=left,
            url=self._url,
            said=tuple(self._said),
            shown=None if watch is None else watch.shown(),
        )

    def _read_page(self) -> Page:
        """The monitor's newest page; the last one known where Redis or the monitor is away (law 1: it may be lost)."""
        if self._cache is not None:
            if self._url is None and (url := self._cache.get(self._url_key)):
                self._url = url.decode()
            data = self._cache.get(self._key)
            if data:
                try:
                    self._page = from_json(data)
                except msgspec.DecodeError:
                    self._phase = "the monitor's page cannot be read: is it of another version?"
        return self._page


class LiveView(_View):
    """One page that is drawn over and over."""

    def __init__(self, settings: RunSettings, began: float, console: Console) -> None:
        super().__init__(settings, began)
        self._watch: Watched | None = None
        self.live = Live(console=console, refresh_per_second=4, get_renderable=self._draw, transient=False)

    def _draw(self) -> Panel:
        return draw(self._page, self._frame(self._watch))

    def phase(self, text: str) -> None:
        self._phase = text

    def say(self, text: str) -> None:
        self._said.append(text)

    def warm_start(self, progress_file: Path) -> None:
        self._phase = describe_warm_start(progress_file)

    def show(self, watch: Watched) -> None:
        self._watch = watch
        self._read_page()


class PlainView(_View):
    """A line now and then; nothing that a log file or a pipe could not hold."""

    def __init__(self, settings: RunSettings, began: float, console: Console) -> None:
        super().__init__(settings, began)
        self._console = console
        self._next = 0.0

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def phase(self, text: str) -> None:
        if text != self._phase:
            self._print(f"{time.monotonic() - self._began:5.0f} s · {text}")
        self._phase = text

    def say(self, text: str) -> None:
        self._print(f"{time.monotonic() - self._began:5.0f} s · {text}")

    def _due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + PLAIN_EVERY_S
        return True

    def warm_start(self, progress_file: Path) -> None:
        if self._due():
            self.phase(describe_warm_start(progress_file))

    def show(self, watch: Watched) -> None:
        if self._due():
            self._print(line(self._read_page(), self._frame(watch)))


def describe_warm_start(progress_file: Path) -> str:
    try:
        progress = json.loads(progress_file.read_text())
    except (FileNotFoundError, ValueError):
        return "warm start: drawing demonstrations"
    return f"warm start: step {progress['step']} of {progress['steps']}, supervised on demonstrations"


@contextmanager
def open_view(*, plain: bool, settings: RunSettings, began: float) -> Iterator[View]:
    """The live page on a terminal, lines elsewhere or when `plain`."""
    console = Console(file=sys.stderr)
    if plain or not console.is_terminal:
        lines = PlainView(settings, began, console)
        try:
            yield lines
        finally:
            lines.close()
        return
    page = LiveView(settings, began, console)
    try:
        with page.live:
            yield page
    finally:
        page.close()
