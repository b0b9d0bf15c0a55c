"""A port for the pages of a Faust worker."""

from __future__ import annotations

import socket


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port
