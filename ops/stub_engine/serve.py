"""A stub server by its settings: the application, and one that runs for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from starlette.applications import Starlette

from rollwire.ops.http_server import served
from rollwire.ops.stub_engine.config import StubEngineConfig
from rollwire.ops.stub_engine.core import StubCore
from rollwire.ops.stub_engine.sglang import sglang_app
from rollwire.ops.stub_engine.vllm import vllm_app


class StubServer(NamedTuple):
    url: str
    core: StubCore
    stop: Callable[[], None]  # the server ends; what runs is answered first, what comes later finds nobody


def stub_app(core: StubCore) -> Starlette:
    return vllm_app(core) if core.config.kind == "vllm" else sglang_app(core)


@contextmanager
def running_stub(config: StubEngineConfig) -> Iterator[StubServer]:
    core = StubCore(config)
    try:
        with served(stub_app(core)) as at:
            yield StubServer(at.url, core, at.stop)
    finally:
        core.close()
