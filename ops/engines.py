"""What samples for a rollout worker: the built-in engine, or vLLM or SGLang with what feeds it weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollwire.consumers.weights.engine_feed import EngineFeed
from rollwire.consumers.weights.targets.engine import EngineTarget, EngineWeights
from rollwire.consumers.weights.targets.folder import FolderTarget
from rollwire.consumers.weights.targets.sglang import SglangWeights
from rollwire.consumers.weights.targets.vllm import Kv, VllmWeights
from rollwire.ops.settings import RunSettings
from rollwire.producers.engine_http import EngineConfig, HttpEngine
from rollwire.producers.engine_http_sglang import SglangWire
from rollwire.producers.engine_http_vllm import VllmWire
from rollwire.producers.engine_http_wire import Wire
from rollwire.schemas.errors import ConfigError
from rollwire.streams.seams.engine import Engine
from rollwire.streams.seams.engine_calls import EngineCalls
from rollwire.streams.seams.weights import WeightSource


def engine_key(config: EngineConfig) -> str | None:
    return os.environ.get(config.api_key_env) or None


def engine_target(config: EngineConfig, *, kv: Kv) -> EngineTarget:
    """The target of a server's settings. Raises `ConfigError` for the built-in engine, and where the folder is taken."""
    calls = EngineCalls(config.url, api_key=engine_key(config))
    engine: EngineWeights
    if config.kind == "vllm":
        engine = VllmWeights(calls, kv=kv, load_s=config.load_s)
    elif config.kind == "sglang":
        engine = SglangWeights(calls, kv=kv, load_s=config.load_s)
    else:
        raise ConfigError("the built-in engine takes its weights in this process")
    root: Path | None = config.root
    if root is None:
        raise ConfigError(f"engine.kind {config.kind} needs engine.root")
    folder = FolderTarget(root, extra=config.first)
    return EngineTarget(engine, folder, root, seen_at=config.seen_at, first=config.first, proof=config.proof)


@contextmanager
def open_engine(settings: RunSettings, source: WeightSource) -> Iterator[tuple[Engine, WeightSource]]:
    """The engine of `settings.fleet.engine`, and the source of weights that the rollout worker follows. `source` stays open."""
    config = settings.fleet.engine
    if config.kind == "builtin":
        from rollwire.producers.engine_torch import TorchEngine

        yield (
            TorchEngine(settings.policy, settings.fleet.max_running, kv_at_swap=settings.fleet.kv_at_swap),
            source,
        )
        return
    wire: Wire = VllmWire()
    if config.kind == "sglang":
        layers = settings.fleet.moe_layers
        wire = SglangWire(
            layers=settings.policy.num_hidden_layers if layers is None else len(layers),
            top_k=settings.policy.num_experts_per_tok,
            original_logprobs=config.original_logprobs,
        )
    target = engine_target(config, kv=settings.fleet.kv_at_swap)
    feed = EngineFeed(source, target)
    engine = HttpEngine(wire, feed, config, api_key=engine_key(config))
    try:
        yield engine, feed
    finally:
        engine.close()
        feed.close()
