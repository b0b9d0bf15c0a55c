"""`rollwire gateway`: takes feedback over HTTP into the log."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from pydantic import ValidationError

from rollwire.ops.broker import DEFAULT_DIR, Folder, Prefix, Registry, broker


def gateway(
    *,
    host: str = "127.0.0.1",
    port: int = 8300,
    rules: Path | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    behind_proxy: Annotated[bool, Parameter(negative=())] = False,
    open: Annotated[bool, Parameter(negative=())] = False,
    tenant: str = "default",
    origin: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    deadline_s: float = 10.0,
    redis: str | None = None,
    bucket: str | None = None,
    prefix: Prefix = None,
    registry: Registry = None,
    dir: Folder = DEFAULT_DIR,
) -> None:
    """Take feedback by `POST /v1/feedback` (and OTLP logs by `POST /v1/logs`) until told to stop.

    Every caller needs an API key: `rollwire gateway-keys add --tenant acme`. An answer 2xx means that the log has the event.

    Parameters
    ----------
    host
        Address to listen on. One that others reach needs --tls-cert and --tls-key, or --behind-proxy.
    port
        0: a free one, named on standard output.
    rules
        TOML file of the signals that are taken; by default the built-in ones.
    tls_cert
        PEM file of the certificate and its chain.
    tls_key
        PEM file of its private key.
    behind_proxy
        A proxy in front ends TLS.
    open
        Take no keys: everyone on this machine may send, as --tenant.
    tenant
        With --open: whose feedback it is.
    origin
        With --open: a page that may call it; may be given several times.
    deadline_s
        Seconds from a whole request to its answer; what the broker has not acknowledged by then is answered 503.
    redis
        URL of the Redis for quotas and repeats; by default the stack's. It may be away.
    bucket
        Bucket of API keys and data keys; by default the stack's.
    """
    from rollwire.ops.config_errors import config_error
    from rollwire.ops.gateway import gateway_app, read_rules, run_gateway
    from rollwire.ops.stack import read_stack
    from rollwire.ops.stopping import stop_on_signals
    from rollwire.producers.gateway.config import GatewayConfig
    from rollwire.producers.gateway.tls import tls_config

    values = {
        "host": host,
        "port": port,
        "tls": tls_config(tls_cert, tls_key),
        "behind_proxy": behind_proxy,
        "open_to_all": open,
        "tenant": tenant,
        "origins": origin,
        "deadline_s": deadline_s,
        "rules": rules,
    }
    try:
        config = GatewayConfig.model_validate(values)
    except ValidationError as error:
        raise config_error(error, GatewayConfig, where="gateway") from None
    known = read_rules(config.rules)
    stack = read_stack(dir)
    if redis is not None:
        stack = stack.model_copy(update={"redis_url": redis})
    at = broker(dir, prefix=prefix, registry=registry)
    stop = threading.Event()
    stop_on_signals(stop)
    with (
        at.log("gateway") as log,
        gateway_app(stack, log, config, prefix=at.prefix, rules=known, bucket=bucket) as app,
    ):
        run_gateway(
            app, config, stop, ready=lambda url: print(f"the gateway takes feedback on {url}", flush=True)
        )
