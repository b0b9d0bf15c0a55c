"""The gateway's own server with an application that reads a request and answers an empty 204: what singles are measured against.

`python -P -m rollwire.ops.bench.feedback.empty --port N`, until SIGTERM.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, cast

from rollwire.ops.gateway import run_gateway
from rollwire.ops.memory import tune_memory
from rollwire.ops.stopping import stop_on_signals
from rollwire.producers.gateway.app import GatewayApp
from rollwire.producers.gateway.config import GatewayConfig

_START = {"type": "http.response.start", "status": 204, "headers": []}
_END = {"type": "http.response.body", "body": b""}


class EmptyApp:
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for word in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{word}.complete"})
            return
        while (await receive()).get("more_body"):
            pass
        await send(_START)
        await send(_END)

    def stopping(self) -> None:
        """Nothing is in flight for long."""


def main(arguments: list[str]) -> None:
    tune_memory()
    stop = threading.Event()
    stop_on_signals(stop)
    values = {"port": int(arguments[arguments.index("--port") + 1]), "open_to_all": True}
    run_gateway(
        cast("GatewayApp", EmptyApp()), GatewayConfig.model_validate(values), stop, ready=lambda _: None
    )


if __name__ == "__main__":
    main(sys.argv[1:])
