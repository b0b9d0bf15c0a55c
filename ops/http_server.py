"""Runs an ASGI application: in the main thread of a command, or in a thread of its own for tests."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import uvicorn
from starlette.applications import Starlette

from rollwire.ops.stack.ports import HOST
from rollwire.ops.stopping import stop_on_signals
from rollwire.schemas.errors import DeadlineExceeded, EnvironmentMissing

START_S = 30.0
STOP_S = 8  # of the 10 s that a process has to end


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections from now on; port 0: a free one. Raises `OSError`."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2_048)
    except OSError:
        listener.close()
        raise
    return listener


def make_server(app: Starlette, *, lifespan: bool = False) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="on" if lifespan else "off",
        timeout_graceful_shutdown=STOP_S,
        timeout_keep_alive=60,
    )
    return uvicorn.Server(config)


def run_server(
    app: Starlette, host: str, port: int, *, ready: Callable[[str], None], lifespan: bool = False
) -> None:
    """Serves until SIGTERM or SIGINT; `ready` is told the URL once connections are taken. For the main thread.

    Raises `EnvironmentMissing` where the port is taken.
    """
    stop = threading.Event()
    stop_on_signals(stop)  # not uvicorn's handlers: they end the process by the signal once it is done
    try:
        with served(app, host=host, port=port, lifespan=lifespan) as at:
            ready(at.url)
            stop.wait()
    except OSError as error:
        raise EnvironmentMissing(f"port {port} on {host}: {error}; choose another with --port") from error


class Served(NamedTuple):
    url: str
    stop: Callable[[], None]


@contextmanager
def served(app: Starlette, *, host: str = HOST, port: int = 0, lifespan: bool = False) -> Iterator[Served]:
    """The application, by default on a free port of this machine. Raises `OSError` where the port is taken,
    `DeadlineExceeded` where it does not come up."""
    listener = listen(host, port)
    server = make_server(app, lifespan=lifespan)
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listener]}, name="http-server", daemon=True
    )
    thread.start()

    def stop() -> None:
        server.should_exit = True
        thread.join(STOP_S + 5)
        listener.close()

    try:
        waited = threading.Event()
        for _ in range(int(START_S / 0.01)):
            if server.started:
                break
            waited.wait(0.01)
        else:
            raise DeadlineExceeded(f"the server did not listen within {START_S:g} s")
        yield Served(f"http://{host}:{listener.getsockname()[1]}", stop)
    finally:
        stop()
