"""What the tests of the seams share."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from rollwire.streams.seams.store_s3 import S3Store

Serves = Callable[[type[http.server.BaseHTTPRequestHandler]], S3Store]


@pytest.fixture
def serves() -> Iterator[Serves]:
    """A store whose server answers as the handler says, until the test ends."""
    with ExitStack() as opened:

        def serve(handler: type[http.server.BaseHTTPRequestHandler]) -> S3Store:
            server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            opened.callback(server.server_close)
            opened.callback(thread.join)
            opened.callback(server.shutdown)
            return S3Store(f"http://127.0.0.1:{server.server_port}", "bucket", "a", "s", timeout_s=5)

        yield serve
