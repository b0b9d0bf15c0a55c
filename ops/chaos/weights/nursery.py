"""Forks the lives of a matrix: `python -P -m rollwire.ops.chaos.weights.nursery`, orders on standard input, a line each.

It has no threads and no clients, so that a fork of it is a process as good as a fresh one. When its input ends it kills
what still lives.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from rollwire.kernels.delta.apply import apply_delta
from rollwire.kernels.delta.encode import encode_delta
from rollwire.ops.chaos.weights.effects import DIED, Effects, exit_now
from rollwire.ops.chaos.weights.lives import Ended, Forked, Order, run_role
from rollwire.ops.chaos.weights.states import LAST, same_bits, state_of
from rollwire.ops.logs import configure_logging
from rollwire.schemas.errors import RollwireError
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.store_s3 import S3Store

_TICK_S: Final = 0.02


class _Child(NamedTuple):
    number: int
    seen: Path


def main() -> None:
    configure_logging()
    _warm()
    orders = msgspec.json.Decoder(Order)
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    children: dict[int, _Child] = {}
    with tempfile.TemporaryDirectory() as folder:
        buffer = b""
        while True:
            readable, _, _ = select.select([sys.stdin.buffer], [], [], _TICK_S)
            if readable:
                data = os.read(sys.stdin.fileno(), 1 << 16)
                if not data:
                    break
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    order = orders.decode(line)
                    seen = Path(folder) / str(order.number)
                    pid = os.fork()
                    if pid == 0:
                        _live(order, seen)
                    children[pid] = _Child(order.number, seen)
                    _say(Forked(order.number, pid=pid))
            _reap(children)
        for pid in children:
            os.kill(pid, signal.SIGKILL)


def _warm() -> None:
    """Compiles what the lives use, and makes the states they compare with: a fork has them at once."""
    for version in range(1, LAST + 1):
        old, new = state_of(version - 1), state_of(version)
        if not same_bits(apply_delta(old, encode_delta(old, new).shards).state, new):
            raise SystemExit("a delta of the matrix does not give its result")


def _live(order: Order, seen: Path) -> None:
    """A life from its fork to its end; does not return."""
    code = 1
    try:
        out = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        access = order.access
        effects = Effects(order.task.crash, exit_now)
        if order.task.folder:
            effects.watch_folder(Path(order.task.folder))
        log = KafkaLog(access.bootstrap, prefix=access.prefix, client_id=f"chaos-{order.task.role}")
        store = S3Store(
            access.endpoint,
            access.bucket,
            access.access_key,
            access.secret_key,
            access.region,
            timeout_s=30.0,
        )
        try:
            run_role(order.task, log, store, effects)
            seen.write_bytes(msgspec.json.encode(dict(effects.seen)))
            code = 0
        except RollwireError as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            code = error.exit_code
        finally:
            log.close()
    finally:
        # What escaped is printed by nobody else; the nursery's own loop must not go on in here.
        if code == 1 and (escaped := sys.exc_info()[1]) is not None:
            sys.excepthook(type(escaped), escaped, escaped.__traceback__)
        sys.stderr.flush()
        os._exit(code)


def _reap(children: dict[int, _Child]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        child = children.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        seen = msgspec.json.decode(child.seen.read_bytes(), type=dict[str, int]) if code == 0 else {}
        why = {0: "", DIED: ""}.get(code, f"exit code {code}")
        _say(Forked(child.number, end=Ended(code, why, seen)))


def _say(said: Forked) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(said) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
