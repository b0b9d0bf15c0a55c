"""The engine behind a stub server: weights with a label, requests that decode, and pauses between two decode steps.

One thread decodes; what controls it (pause, load, label, abort) happens between two steps, as in the real schedulers.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.policy.config import PolicyConfig
from rollwire.kernels.tensors import Tensor
from rollwire.ops.stub_engine.config import StubEngineConfig
from rollwire.ops.stub_engine.weights import checksums, overlay_folder, read_config, read_folder
from rollwire.schemas.errors import ConfigError, EngineRefused
from rollwire.streams.seams.engine import Sampled, SampleRequest

if TYPE_CHECKING:
    from rollwire.producers.engine_torch import TorchEngine

PauseMode = Literal["abort", "wait", "keep"]
CLOSE_S = 10.0


class LabelSpan(NamedTuple):
    """Sampled tokens [start, end) came from the weights labelled `version`."""

    version: str
    start: int
    end: int


class StubResult(NamedTuple):
    sampled: Sampled
    spans: tuple[LabelSpan, ...]


class Paused(Exception):
    """New requests are turned away until the resume."""


class NoSampler(Exception):
    """torch is not installed: the server loads weights, and samples nothing."""


def label_spans(versions_S: NDArray[np.int64], labels: list[str]) -> tuple[LabelSpan, ...]:
    """Runs of tokens of one label, half-open, in order. `versions_S` are indices into `labels`."""
    spans: list[LabelSpan] = []
    for at, index in enumerate(versions_S.tolist()):
        label = labels[index]
        if spans and spans[-1].version == label:
            spans[-1] = spans[-1]._replace(end=at + 1)
        else:
            spans.append(LabelSpan(label, at, at + 1))
    return tuple(spans)


class StubCore:
    """Loads the folder at once. Raises what `read_folder` and `read_config` raise."""

    def __init__(self, config: StubEngineConfig) -> None:
        self.config = config
        self.policy = read_config(config.model_path)
        self.model_path = str(config.model_path)
        self.calls: list[str] = []  # "METHOD /path?query", in the order in which they came
        self.decoded = 0  # decode steps
        self.step_delay_s = config.step_delay_s
        self._state: dict[str, Tensor] = read_folder(config.model_path)
        self._labels = [config.weight_version]
        self._engine = _engine(config, self.policy)
        self._futures: dict[str, Future[StubResult]] = {}
        self._paused = self._rejecting = self._retracted = self._sleeping = False
        self._changed = threading.Condition()
        self._closed = False
        if self._engine is not None:
            self._engine.swap(0, self._state)
        self._thread = threading.Thread(target=self._decode, name="stub-engine", daemon=True)
        self._thread.start()

    @property
    def samples(self) -> bool:
        return self._engine is not None

    @property
    def label(self) -> str:
        with self._changed:
            return self._labels[-1]

    @property
    def paused(self) -> bool:
        with self._changed:
            return self._paused

    @property
    def sleeping(self) -> bool:
        with self._changed:
            return self._sleeping

    @property
    def running(self) -> int:
        with self._changed:
            return len(self._futures)

    def submit(self, request: SampleRequest) -> Future[StubResult]:
        """Raises `Paused`, `NoSampler`, `ConfigError`."""
        with self._changed:
            if self._engine is None:
                raise NoSampler
            if self._rejecting:
                raise Paused
            if request.request_id in self._futures:
                raise ConfigError(f"request {request.request_id} is running already")
            self._engine.submit([request])
            future: Future[StubResult] = Future()
            self._futures[request.request_id] = future
            self._changed.notify_all()
            return future

    def abort(self, request_ids: Collection[str] | None = None) -> int:
        """Ends requests with what they have; by default all. The number that were running."""
        with self._changed:
            ended = [] if self._engine is None else self._engine.abort(request_ids)
            self._resolve(ended)
            return len(ended)

    def abort_prefix(self, prefix: str) -> int:
        with self._changed:
            return self.abort([name for name in self._futures if name.startswith(prefix)])

    def pause(self, mode: PauseMode, *, reject: bool, retract: bool = False, wait_s: float = 60.0) -> None:
        """Returns when no step runs any more; `reject`: new requests are turned away; `retract`: running ones are queued
        again, and read from their start after the resume. Raises `EngineRefused` at `wait_s`."""
        with self._changed:
            self._rejecting = reject
            if mode == "abort":
                self.abort()
            elif mode == "wait" and not self._changed.wait_for(lambda: not self._futures, wait_s):
                raise EngineRefused(f"{len(self._futures)} requests still run after {wait_s:g} s")
            self._paused = True
            self._retracted = retract
            if retract and self._engine is not None:
                self._engine.recompute_cache()

    def resume(self) -> None:
        with self._changed:
            self._paused = self._rejecting = self._retracted = False
            self._changed.notify_all()

    def sleep(self) -> None:
        with self._changed:
            self._sleeping = True

    def wake(self) -> None:
        with self._changed:
            self._sleeping = False
            self._changed.notify_all()

    def load(self, folder: Path) -> None:
        """Weights of a folder under the present label. Torn after an error, as a real engine is."""
        with self._changed:
            torn = dict(self._state)
            try:
                overlay_folder(torn, folder)
            finally:
                self._state = torn
                if self._engine is not None:
                    self._engine.swap(len(self._labels) - 1, self._state)
            self.model_path = str(folder)

    def set_label(self, label: str) -> None:
        """The label of the tokens sampled from now on."""
        with self._changed:
            self._labels.append(label)
            if self._engine is not None:
                self._engine.swap(len(self._labels) - 1, self._state)

    def reset_cache(self, *, running: bool) -> bool:
        """Forgets keys and values of earlier weights. False while requests hold some, unless they are to be `running` anew."""
        with self._changed:
            if self._futures and not running:
                return False
            if self._engine is not None:
                self._engine.recompute_cache()
            return True

    def flush_cache(self) -> bool:
        """As SGLang's: false while a request runs; those that a retracting pause has queued hold no cache."""
        with self._changed:
            return not self._futures or (self._paused and self._retracted)

    def rows_of(self, name: str, count: int) -> list[float] | list[list[float]] | None:
        """The first rows of a tensor as floats; None where there is no such tensor."""
        with self._changed:
            held = self._state.get(name)
        if held is None:
            return None
        values = _floats(held).reshape(held.shape)[:count]
        found: list[float] | list[list[float]] = values.tolist()
        return found

    def checksums(self) -> dict[str, str]:
        with self._changed:
            return checksums(self._state)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self.abort()
            self._changed.notify_all()
        self._thread.join(CLOSE_S)

    def _decode(self) -> None:
        def ready() -> bool:
            return self._closed or (bool(self._futures) and not self._paused and not self._sleeping)

        while True:
            with self._changed:
                self._changed.wait_for(ready)
                if self._closed or self._engine is None:
                    return
                self._resolve(self._engine.step())
                self.decoded += 1
            if self.step_delay_s:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, self.step_delay_s)

    def _resolve(self, ended: list[Sampled]) -> None:
        for sampled in ended:
            spans = label_spans(sampled.versions, self._labels)
            self._futures.pop(sampled.request_id).set_result(StubResult(sampled, spans))
        if ended:
            self._changed.notify_all()


def _engine(config: StubEngineConfig, policy: PolicyConfig) -> TorchEngine | None:
    try:
        from rollwire.producers.engine_torch import TorchEngine
    except ImportError:
        return None
    return TorchEngine(policy, config.max_running)


def _floats(tensor: Tensor) -> NDArray[np.float32]:
    if tensor.dtype == "BF16":
        return (tensor.bits.astype(np.uint32) << 16).view(np.float32)
    if tensor.dtype == "F16":
        return tensor.bits.view(np.float16).astype(np.float32)
    if tensor.dtype == "F32":
        return tensor.bits.view(np.float32)
    raise ConfigError(f"a policy is BF16, F16 or F32, not {tensor.dtype}")
