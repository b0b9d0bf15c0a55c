"""Free ports on 127.0.0.1."""

from __future__ import annotations

import random
import socket

from rollwire.schemas.errors import EnvironmentMissing, StackError

HOST = "127.0.0.1"
# Below the range from which Linux and macOS take ports for outgoing connections, so that a port stays free across a restart.
_FIRST, _LAST = 20_000, 32_000


def is_free(port: int) -> bool:
    """Whether a server could listen there now. Connections that linger after a server's end do not count."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def choose_port(setting: str, fixed: int | None, previous: int | None, taken: set[int]) -> int:
    """The port for one service: the fixed one, else the one it had before, else a free one; added to `taken`.

    Raises `EnvironmentMissing` where the fixed one is in use.
    """
    if fixed is not None:
        if fixed in taken or not is_free(fixed):
            raise EnvironmentMissing(
                f"port {fixed} ({setting}) is in use on {HOST}: end what listens there (`ss -ltnp 'sport = :{fixed}'` names it)"
                f" or choose another {setting}"
            )
        taken.add(fixed)
        return fixed
    if previous is not None and previous not in taken and is_free(previous):
        taken.add(previous)
        return previous
    for _ in range(1_000):
        port = random.randint(_FIRST, _LAST)
        if port not in taken and is_free(port):
            taken.add(port)
            return port
    raise StackError(f"no free port between {_FIRST} and {_LAST} on {HOST}")
