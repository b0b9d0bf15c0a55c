"""`rollwire fleet gate`: 409 where a request's demand on the weight version is not met."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Literal

from cyclopts import Parameter, validators

from rollwire.ops.stack.ports import HOST


def gate(
    url: str,
    /,
    *,
    kind: Literal["vllm", "sglang"] = "vllm",
    port: int = 8100,
    host: str = HOST,
    request_s: Annotated[float, Parameter(validator=validators.Number(gt=0))] = 900.0,
) -> None:
    """Stand in front of an engine, until SIGTERM: requests may demand a version, answers say which ones they came from.

    A demand is the header X-Rollwire-Min-Version or X-Rollwire-Version (exact), or min_weight_version or exact_weight_version in the body.
    Where it is not met, before or after the answer was sampled, the answer is 409 with the version that is served. Calls
    that change weights are not let through. $ROLLWIRE_ENGINE_KEY is the key with which the gate asks for the version.

    Parameters
    ----------
    url
        Address of the engine.
    kind
        What it is.
    port
        Where the gate listens; 0: a free port, named on standard output.
    request_s
        Deadline of one request.
    """
    from rollwire.consumers.weights.gate_proxy import GateConfig, gate_app
    from rollwire.ops.http_server import run_server

    config = GateConfig(
        kind=kind, url=url, api_key=os.environ.get("ROLLWIRE_ENGINE_KEY") or None, request_s=request_s
    )
    run_server(
        gate_app(config),
        host,
        port,
        ready=lambda at: print(f"gate at {at}, in front of {kind} at {url}", file=sys.stdout, flush=True),
        lifespan=True,
    )
