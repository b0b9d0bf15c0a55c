"""vLLM or SGLang behind the engine seam: many requests in flight over HTTP, from one thread that never waits for them.

A server that dies takes its requests and its weights with it. They are asked again, with a new id, once the weights are back
(`EngineFeed.restore`): a request's draws depend on its seed alone, so nothing of it is sampled twice with other luck.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import httpx
import numpy as np
import structlog
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollwire.kernels.tensors import State
from rollwire.producers.engine_http_wire import Call, UnknownWeights, Wire
from rollwire.schemas.errors import ConfigError, EngineError, EngineRefused, EngineUnavailable, WeightError
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.engine import Sampled, SampleRequest
from rollwire.streams.seams.engine_calls import headers_of, read_answer

_log = structlog.get_logger()
_ATTEMPTS: Final = 20  # at a request whose answers come from other weights: somebody else loads them, then
_RETRY_S: Final = 0.5  # between two looks at an engine that is away


class EngineConfig(BaseModel):
    """What samples: the built-in engine, or a server of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["builtin", "vllm", "sglang"] = Field(
        default="builtin", description="the built-in engine in this process, or a server at `url`"
    )
    url: str = Field(default="", description="of the server: http://host:port")
    api_key_env: str = Field(
        default="ROLLWIRE_ENGINE_KEY",
        description="environment variable that holds the server's API key, if it has one",
    )
    root: Path | None = Field(
        default=None, description="folder for the versions' safetensors; the server must see it"
    )
    seen_at: Path | None = Field(
        default=None, description="the name of `root` where the server runs; none: the same"
    )
    first: Path | None = Field(
        default=None,
        description="folder that the server was started with: its config.json and tokenizer go beside each version, and a first "
        "load that fails goes back to it",
    )
    proof: Literal["label", "fingerprint"] = Field(
        default="label",
        description="after a load: believe the server's label, or also hash its weights (within the pause)",
    )
    original_logprobs: bool = Field(
        default=False, description="SGLang runs with SGLANG_RETURN_ORIGINAL_LOGPROB=1"
    )
    poll_s: float = Field(default=0.02, gt=0, description="longest wait of a step for a request that ends")
    request_s: float = Field(default=900.0, gt=0, description="deadline of one request")
    load_s: float = Field(default=600.0, gt=0, description="deadline of loading one version")
    patience_s: float = Field(default=300.0, gt=0, description="seconds without the server before giving up")
    abort_s: float = Field(default=3.0, gt=0, description="longest wait for what aborted requests have")

    @model_validator(mode="after")
    def _whole(self) -> EngineConfig:
        if self.kind != "builtin" and not (self.url.startswith(("http://", "https://")) and self.root):
            raise ValueError(f"engine.kind {self.kind} needs engine.url (http://host:port) and engine.root")
        return self


class EngineFeed(Protocol):
    """What puts weights into the server; calls come from the engine's thread."""

    def swap(self, version: int, state: State) -> None:
        """Raises `WeightError`; then the version before serves."""
        ...

    def restore(self) -> None:
        """Sees to it that the server serves the version that was swapped in last. Raises `WeightError`, `EngineError`."""
        ...


class HttpEngine:
    """Implements `streams.seams.engine.Engine`."""

    def __init__(
        self,
        wire: Wire,
        feed: EngineFeed,
        config: EngineConfig,
        *,
        api_key: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._wire = wire
        self._feed = feed
        self._config = config
        self._clock = clock or SystemClock()
        self._version = -1
        self._versions: set[int] = set()
        self._running: dict[str, _Flight] = {}
        self._ended: queue.SimpleQueue[tuple[str, Sampled | EngineError]] = queue.SimpleQueue()
        self._doubt = threading.Event()  # the server was away, or holds other weights
        self._away_since: float | None = None
        self._look_at = 0.0
        self._loop = asyncio.new_event_loop()
        self._sound = asyncio.Event()
        self._client = httpx.AsyncClient(
            base_url=config.url.rstrip("/"),
            headers=headers_of(api_key),
            timeout=httpx.Timeout(config.request_s, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=False,
        )
        self._sound.set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-http", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """-1 before the first swap."""
        return self._version

    @property
    def running(self) -> int:
        return len(self._running)

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Raises `ConfigError` for one that cannot be sampled; then none was taken."""
        for request in requests:
            if (
                request.request_id in self._running
                or not request.prompt_ids.size
                or request.max_new_tokens < 1
            ):
                raise ConfigError(
                    f"{request.request_id} is running already, or has no prompt, or samples nothing"
                )
            self._wire.check(request)
        for request in requests:
            flight = _Flight(request)
            self._running[request.request_id] = flight
            flight.task = asyncio.run_coroutine_threadsafe(self._fly(flight), self._loop)

    def step(self) -> list[Sampled]:
        """What has ended; waits up to `poll_s` for the first. Raises `EngineRefused`, and `EngineUnavailable` after
        `patience_s` without the server."""
        if not self._running:
            return []
        if self._version < 0:
            raise WeightError("no weights to sample with: swap a version in first")
        if self._doubt.is_set():
            self._restore()
        return self._take(self._config.poll_s)

    def swap(self, version: int, state: State) -> None:
        """Raises `ConfigError`, `WeightError`; the version before then goes on serving."""
        if version < 0:
            raise ConfigError(f"versions are not negative, got {version}")
        self._versions.add(version)  # tokens may come from it before this returns
        self._feed.swap(version, state)
        self._version = version

    def abort(self) -> list[Sampled]:
        """Everything that was taken; what the server does not hand back within `abort_s` comes back with no tokens."""
        flights = list(self._running.values())
        asyncio.run_coroutine_threadsafe(self._abort([each.wire_id for each in flights]), self._loop)
        deadline = self._clock.monotonic_s() + self._config.abort_s
        ended: list[Sampled] = []
        while self._running and (left := deadline - self._clock.monotonic_s()) > 0:
            ended += self._take(left)
        for flight in self._running.values():
            if flight.task is not None:
                flight.task.cancel()
            ended.append(_nothing(flight.request))
        self._running.clear()
        return ended

    def close(self) -> None:
        """Ends the requests in flight unanswered."""

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.aclose()

        self._running.clear()
        try:
            asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()

    def _take(self, wait_s: float) -> list[Sampled]:
        ended: list[Sampled] = []
        while self._running:
            try:
                request_id, what = self._ended.get(timeout=0 if ended else wait_s)
            except queue.Empty:
                break
            if request_id not in self._running:  # aborted, and answered after all
                continue
            if isinstance(what, EngineError):
                raise what
            del self._running[request_id]
            ended.append(what)
        return ended

    def _restore(self) -> None:
        now = self._clock.monotonic_s()
        if now < self._look_at:
            return
        self._away_since = now if self._away_since is None else self._away_since
        self._look_at = now + _RETRY_S
        try:
            self._feed.restore()
        except (EngineError, WeightError) as error:
            if now - self._away_since > self._config.patience_s:
                raise EngineUnavailable(
                    f"{self._config.url} was away for {now - self._away_since:.0f} s: {error}"
                ) from error
            _log.warning("engine.away", url=self._config.url, error=str(error))
            return
        _log.info("engine.back", url=self._config.url, version=self._version)
        self._away_since = None
        self._doubt.clear()
        self._loop.call_soon_threadsafe(self._sound.set)

    async def _fly(self, flight: _Flight) -> None:
        """Until it is answered: by this server, or by the one that comes after it."""
        request = flight.request
        while True:
            await self._sound.wait()
            flight.attempt += 1
            try:
                answer = await self._post(self._wire.generate(request, flight.wire_id, str(self._version)))
                sampled = self._wire.read(request, answer, self._versions)
            except (EngineUnavailable, UnknownWeights) as error:
                if isinstance(error, UnknownWeights) and flight.attempt >= _ATTEMPTS:
                    self._ended.put((request.request_id, EngineRefused(f"{error}, {_ATTEMPTS} times")))
                    return
                _log.warning("engine.request_lost", request=request.request_id, error=str(error))
                self._sound.clear()
                self._doubt.set()
            except EngineError as error:
                self._ended.put((request.request_id, error))
                return
            except Exception as error:  # noqa: BLE001  # a thread's edge: a request that vanishes would be waited for
                what = EngineRefused(f"{request.request_id}: {type(error).__name__}: {error}")
                self._ended.put((request.request_id, what))
                return
            else:
                self._ended.put((request.request_id, sampled))
                return

    async def _abort(self, wire_ids: list[str]) -> None:
        for call in self._wire.aborts(wire_ids):
            try:
                await self._post(call)
            except EngineError as error:  # then they end unanswered
                _log.warning("engine.abort_failed", error=str(error))
                return

    async def _post(self, call: Call) -> Any:
        try:
            response = await self._client.post(call.path, json=call.body)
        except httpx.HTTPError as error:
            raise EngineUnavailable(
                f"{self._config.url}{call.path}: {type(error).__name__}: {error}"
            ) from error
        return read_answer(response)


class _Flight:
    """A request and how often it was asked."""

    def __init__(self, request: SampleRequest) -> None:
        self.request = request
        self.attempt = 0
        self.task: Any = None

    @property
    def wire_id(self) -> str:
        return f"{self.request.request_id}.a{self.attempt}"


def _nothing(request: SampleRequest) -> Sampled:
    empty = np.empty(0, np.int64)
    return Sampled(request.request_id, empty, np.empty(0, np.float32), empty, None, "abort")
