"""Scores untrusted answers in a process with limits; a hang or a death costs one verdict, never the batch.

Replies come in order, so the first request without one is the culprit. The process is started anew, the culprit is
tried once more alone (a neighbour may have poisoned the process), and only then it is `unscorable`: a reward of None,
never 0 (C09). The others of its batch are scored as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import structlog
from pydantic import BaseModel, ConfigDict, Field

from rollwire.producers.verifier.frames import (
    MAX_REPLY,
    READY,
    BadFrame,
    FrameReader,
    ScoreReply,
    ScoreRequest,
    decode_reply,
    encode_requests,
)
from rollwire.schemas.errors import EnvironmentMissing
from rollwire.streams.seams.environment import Verdict

_log = structlog.get_logger()

UNSCORABLE = "unscorable"


class SandboxConfig(BaseModel):
    """Limits of the evaluator's process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    answer_s: float = Field(
        default=2.0, gt=0, description="seconds for the next verdict before it counts as a hang"
    )
    cpu_s: int = Field(default=10, ge=1, description="CPU seconds of one batch (RLIMIT_CPU)")
    memory_mb: int = Field(
        default=256, ge=16, description="MiB above what the loaded process maps (RLIMIT_AS)"
    )
    start_s: float = Field(default=30.0, gt=0, description="seconds for the process to load its environment")


class Sandbox:
    """One evaluator process, started on demand. Not thread-safe. `target`: see `child.load_environment`.

    `restarts` counts the processes that had to be replaced, `unscorable` the requests given up.
    """

    def __init__(self, target: str, config: SandboxConfig | None = None) -> None:
        self._target = target
        self._config = config or SandboxConfig()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self.restarts = 0
        self.unscorable = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def score(self, requests: Sequence[ScoreRequest], *, budget_s: float = 60.0) -> list[Verdict]:
        """One verdict a request, in order: of all requests, or of as many as `budget_s` allows, but at least one.

        The budget may be passed by two `answer_s` and two starts (a culprit is tried twice). Raises
        `EnvironmentMissing` where the process does not start at all.
        """
        deadline = time.monotonic() + budget_s
        verdicts: list[Verdict] = []
        while len(verdicts) < len(requests) and not (verdicts and time.monotonic() > deadline):
            verdicts += self._score_until_stop(requests[len(verdicts) :], deadline)
            if self._connection is not None:
                continue
            culprit = requests[len(verdicts)]
            again = self._score_until_stop([culprit], deadline)
            if not again:
                self.unscorable += 1
                _log.warning("unscorable", task=culprit.task, bytes=len(culprit.sampled_ids))
                again = [Verdict(None, (), UNSCORABLE)]
            verdicts += again
        return verdicts

    def close(self) -> None:
        """Ends the process; a later `score` starts another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # the session's leader, and whatever it started
            self._process.wait()
            self._process = None

    def _score_until_stop(self, requests: Sequence[ScoreRequest], deadline: float) -> list[Verdict]:
        """Verdicts up to the first request that got none: at a fault (then the process is gone) or the deadline."""
        connection = self._started()
        verdicts: list[Verdict] = []
        frames = FrameReader(MAX_REPLY)
        try:
            connection.settimeout(self._config.answer_s)
            connection.sendall(encode_requests(list(requests)))
            while len(verdicts) < len(requests):
                if verdicts and time.monotonic() > deadline:
                    self.close()  # it is still at work on the rest
                    return verdicts
                verdicts.append(_verdict(self._next_reply(connection, frames, len(verdicts))))
        except (OSError, BadFrame) as fault:
            self.restarts += 1
            _log.warning(
                "evaluator_replaced", fault=f"{type(fault).__name__}: {fault}", answered=len(verdicts)
            )
            self.close()
        return verdicts

    def _next_reply(self, connection: socket.socket, frames: FrameReader, index: int) -> ScoreReply:
        deadline = time.monotonic() + self._config.answer_s
        while (body := frames.next()) is None:
            # A drip of bytes must not renew the deadline.
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("no verdict in time")
            connection.settimeout(left)
            data = connection.recv(256 * 1024)
            if not data:
                raise ConnectionResetError("the evaluator died")
            frames.feed(data)
        return decode_reply(body, index)

    def _started(self) -> socket.socket:
        if self._connection is not None:
            return self._connection
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-I", "-m", "rollwire.producers.verifier.child", self._target]
        command += [str(self._config.cpu_s), str(self._config.memory_mb * 1024 * 1024)]
        # Nothing of our environment (credentials above all) goes to a process that reads strangers' text.
        environment = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd="/",
                env=environment,
                start_new_session=True,  # Ctrl-C ends the verifier, which ends this
            )
        ours.settimeout(self._config.start_s)
        self._connection = ours
        ready = b""
        with contextlib.suppress(OSError):
            ready = ours.recv(1)
        if ready != READY:
            raise EnvironmentMissing(f"the evaluator of {self._target!r} did not start: {self._last_words()}")
        if self._process.stderr is not None:
            self._process.stderr.close()
        return ours

    def _last_words(self) -> str:
        process = self._process
        if process is None or process.stderr is None:
            return "no process"
        process.kill()
        with process.stderr as stderr:
            text = stderr.read(65_536).decode(errors="replace").strip()
        self.close()
        return text.rsplit("\n", 1)[-1] or f"exit code {process.returncode}, no message"


def _verdict(reply: ScoreReply) -> Verdict:
    return Verdict(reply.reward, reply.components, reply.outcome)
