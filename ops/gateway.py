"""The feedback gateway on a stack: its doors opened, its server run. `rollwire gateway` and the role `gateway` are this."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import structlog
import uvicorn

from rollwire.ops.http_bounds import BoundedHttp
from rollwire.ops.http_server import START_S, listen
from rollwire.ops.keys import open_keys, pseudonym_secret
from rollwire.ops.memory import tune_memory
from rollwire.ops.stack import StackInfo
from rollwire.ops.stores import stack_store
from rollwire.producers.gateway.access import Access, OpenAccess
from rollwire.producers.gateway.app import GatewayApp
from rollwire.producers.gateway.config import GatewayConfig
from rollwire.producers.gateway.key_store import StoredKeys
from rollwire.producers.gateway.origins import parse_origins
from rollwire.producers.gateway.quotas import LeasedQuotas
from rollwire.producers.gateway.repeats import CachedRepeats
from rollwire.producers.gateway.serve import make_app
from rollwire.producers.gateway.tls import check_exposure, check_tls
from rollwire.schemas.errors import ConfigError, DeadlineExceeded, EnvironmentMissing
from rollwire.schemas.rules import Rules, default_rules, parse_rules
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.erasures import ErasureFollower
from rollwire.streams.seams.hints_redis import RedisHints
from rollwire.streams.seams.log_kafka import KafkaLog

_log = structlog.get_logger("rollwire.gateway")
_GRACE_S: Final = (
    7  # `GatewayConfig.stop_s` and its answers are inside of it, and it inside of the 9 s that a process has
)
_KEYS_S: Final = 2.0  # of a look for new keys: a change is known within `keys.poll_s` and this
_LEASES_S: Final = 0.25  # of a lease on quotas: a thread of its own waits for it
_HANDOVER_S: Final = 0.0005


def read_rules(path: Path | None) -> Rules:
    """None: the default ones. Raises `ConfigError`."""
    if path is None:
        return default_rules()
    try:
        return parse_rules(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the rules {path} cannot be read: {error}") from error


@contextmanager
def gateway_app(
    stack: StackInfo,
    log: KafkaLog,
    config: GatewayConfig,
    *,
    prefix: str,
    rules: Rules,
    bucket: str | None = None,
) -> Iterator[GatewayApp]:
    """The application with the stack's keys, quotas and repeats; what it opened is closed at the end."""
    clock = SystemClock()
    with ExitStack() as opened:
        access: Access
        if config.open_to_all:
            access = OpenAccess(config.tenant, origins=parse_origins(config.origins))
        else:
            store = stack_store(stack, bucket, timeout_s=_KEYS_S)
            access = stored = StoredKeys(store, config.keys, clock)
            opened.callback(stored.close)
        hints = RedisHints(stack.redis_url, prefix, timeout_s=config.hints_timeout_s)
        opened.callback(hints.close)
        patient = RedisHints(stack.redis_url, prefix, timeout_s=_LEASES_S)
        opened.callback(patient.close)
        quotas = LeasedQuotas(patient, config.quotas, clock)
        opened.callback(quotas.close)
        repeats = CachedRepeats(hints, config.repeats)
        opened.callback(repeats.close)
        keys = open_keys(stack, timeout_s=config.deadline_s / 2)
        follower = ErasureFollower(log, keys.forget)
        opened.callback(follower.close)
        yield make_app(
            log,
            keys,
            pseudonym_secret(stack),
            config=config,
            rules=rules,
            access=access,
            quotas=quotas,
            repeats=repeats,
            clock=clock,
        )


def run_gateway(
    app: GatewayApp, config: GatewayConfig, stop: threading.Event, *, ready: Callable[[str], None]
) -> None:
    """Serves until `stop` is set, then answers what is in flight. `ready` is told the URL once connections are taken.

    Raises `EnvironmentMissing` where the port is taken, `ConfigError` where others would reach it unsafely.
    """
    check_exposure(
        config.host,
        tls=config.tls is not None,
        behind_proxy=config.behind_proxy,
        open_to_all=config.open_to_all,
    )
    if config.tls is not None:
        check_tls(config.tls, SystemClock().now_us())
    try:
        listener = listen(config.host, config.port)
    except OSError as error:
        raise EnvironmentMissing(
            f"port {config.port} on {config.host}: {error}; choose another with --port"
        ) from error
    with listener:
        server = uvicorn.Server(_server_config(app, config))
        thread = threading.Thread(
            target=server.run, kwargs={"sockets": [listener]}, name="http-server", daemon=True
        )
        # What stands now stands for ever: a collection need not look through it, and comes less often.
        tune_memory()
        # Loop and commit thread hand over at each write and each acknowledgement. By default whoever has the interpreter
        # keeps it for 5 ms while the other waits: half of the throughput of singles.
        sys.setswitchinterval(_HANDOVER_S)
        thread.start()
        _await_start(server, thread)
        ready(_url(config, listener))
        while not stop.wait(0.5) and thread.is_alive():
            pass
        app.stopping()
        server.should_exit = True
        thread.join(_GRACE_S + 2)


def _server_config(app: GatewayApp, config: GatewayConfig) -> uvicorn.Config:
    tls = config.tls
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=BoundedHttp,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=2_048,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=_GRACE_S,
        ssl_certfile=None if tls is None else str(tls.cert),
        ssl_keyfile=None if tls is None else str(tls.key),
    )


def _await_start(server: uvicorn.Server, thread: threading.Thread) -> None:
    pause = threading.Event()
    for _ in range(int(START_S / 0.01)):
        if server.started:
            return
        if not thread.is_alive():
            break
        pause.wait(0.01)
    raise DeadlineExceeded(f"the gateway did not listen within {START_S:g} s")


def _url(config: GatewayConfig, listener: socket.socket) -> str:
    scheme = "http" if config.tls is None else "https"
    return f"{scheme}://{config.host}:{listener.getsockname()[1]}"
