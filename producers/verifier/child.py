"""The evaluator's process: loads one environment, gives up its rights, then scores batches until the pipe ends.

Started by `sandbox.Sandbox` as `python -I -m rollwire.producers.verifier.child TARGET CPU_S MEMORY_BYTES`, its socket as
standard input. Imports come first, limits second: after them the process can open no file and no socket, write no
byte to a disk, start no process (root alone can: what it starts dies with it), and has a cap on memory and, renewed
for each batch, on CPU seconds.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import resource
import socket
import sys
from pathlib import Path

import numpy as np

from rollwire.producers.verifier.frames import (
    MAX_FRAME,
    READY,
    FrameReader,
    ScoreReply,
    ScoreRequest,
    decode_requests,
    encode_reply,
    receive_frame,
)
from rollwire.schemas.errors import ConfigError
from rollwire.streams.seams.environment import Environment


def load_environment(target: str) -> Environment:
    """Builds `MODULE:CLASS` or `/path/to/file.py:CLASS` without arguments. Raises `ConfigError`."""
    where, _, attribute = target.rpartition(":")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(where).stem, where)
            if spec is None or spec.loader is None:
                raise ConfigError(f"{where} can't be loaded as a module")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
        environment: Environment = getattr(module, attribute)()
    except (ImportError, AttributeError, ValueError, OSError) as error:
        raise ConfigError(f"no environment at {target!r} (MODULE:CLASS or FILE.py:CLASS): {error}") from error
    return environment


def _limit(what: int, value: int) -> None:
    """Lowers a limit for good: soft and hard."""
    _, hard = resource.getrlimit(what)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (bound, bound))


def give_up_rights(memory_bytes: int) -> None:
    """No new files or sockets, no bytes to disk, no core dumps, no processes, `memory_bytes` above what is mapped now.

    Standard error was for the start only: afterwards a full or closed pipe could stop the process.
    """
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)
    os.close(silent)
    statm = Path("/proc/self/statm")
    mapped = int(statm.read_text().split()[0]) * resource.getpagesize() if statm.exists() else 0
    _limit(resource.RLIMIT_AS, mapped + memory_bytes)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NPROC, 0)
    _limit(resource.RLIMIT_NOFILE, 3)


def _allow_cpu(seconds: int) -> None:
    """SIGXCPU ends the process when it has burnt `seconds` more than now."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + seconds, hard))


def score_one(environment: Environment, index: int, request: ScoreRequest) -> ScoreReply:
    """Errors of the environment make this one request unscorable; exhausted memory ends the process."""
    sampled_S = np.frombuffer(request.sampled_ids, dtype="<i8").astype(np.int64)
    try:
        verdict = environment.score(request.task, sampled_S, request.finish_reason)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # the edge of the evaluator's process: any fault is the request's
        return ScoreReply(index, None, (), f"unscorable: {type(error).__name__}")
    return ScoreReply(index, verdict.reward, verdict.components, verdict.outcome)


def main() -> int:
    target, cpu_s, memory_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    connection = socket.socket(fileno=0)
    environment = load_environment(target)
    give_up_rights(memory_bytes)
    connection.sendall(READY)
    reader = FrameReader(MAX_FRAME)
    while (body := receive_frame(connection, reader)) is not None:
        _allow_cpu(cpu_s)
        for index, request in enumerate(decode_requests(body)):
            # One frame each, at once: the verifier must know which request was being scored when we hang or die.
            connection.sendall(encode_reply(score_one(environment, index, request)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
