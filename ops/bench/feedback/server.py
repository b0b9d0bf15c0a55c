"""A server under test as a process of its own: started, asked, killed, started again on the same port."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rollwire.ops.stack.ports import HOST, choose_port
from rollwire.schemas.errors import DeadlineExceeded

_START_S: Final = 60.0
_STOP_S: Final = 15.0
_ASK_S: Final = 10.0
_AGAIN_S: Final = 0.02


class ServerProcess:
    """`command` takes the port behind `--port`, which is added; `ready` is a path that is answered 2xx when it is up."""

    def __init__(
        self, command: Sequence[str], log: Path, ready: str, variables: Mapping[str, str] | None = None
    ) -> None:
        self.port = choose_port("port", None, None, set())
        self._command = [*command, "--port", str(self.port)]
        self._log = log
        self._ready = ready
        self._environment = {**os.environ, **(variables or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Seconds until it was ready. Raises `DeadlineExceeded`."""
        began_s = time.monotonic()
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                self._command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=self._environment
            )
        while time.monotonic() - began_s < _START_S and self._process.poll() is None:
            try:
                self.get(self._ready)
                return time.monotonic() - began_s
            except OSError:
                time.sleep(_AGAIN_S)
        said = self._log.read_text(errors="replace")[-2_000:]
        self.kill()
        raise DeadlineExceeded(f"{' '.join(self._command)} did not get ready: {said}")

    def get(self, path: str) -> str:
        """Raises `OSError`."""
        with urllib.request.urlopen(f"http://{HOST}:{self.port}{path}", timeout=_ASK_S) as answer:
            return str(answer.read(), "utf-8")

    def check(self) -> None:
        """Raises `DeadlineExceeded` where it has ended."""
        if self._process is None or self._process.poll() is not None:
            said = self._log.read_text(errors="replace")[-2_000:]
            raise DeadlineExceeded(f"{' '.join(self._command)} ended: {said}")

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_STOP_S)

    def stop(self) -> float:
        """SIGTERM; seconds until it had ended. Raises `DeadlineExceeded`."""
        began_s = time.monotonic()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
                raise DeadlineExceeded(f"the server had not ended {_STOP_S:g} s after SIGTERM") from None
        return time.monotonic() - began_s
