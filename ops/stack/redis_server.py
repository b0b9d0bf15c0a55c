"""Redis without persistence: it holds only what may be lost (law 1), on 127.0.0.1."""

from __future__ import annotations

from pathlib import Path

from rollwire.ops.stack.info import Choices
from rollwire.ops.stack.ports import HOST
from rollwire.ops.stack.service import Service
from rollwire.schemas.errors import StackError


def redis_service(server: Path, folder: Path, choices: Choices, max_memory_mib: int) -> Service:
    """`choices` must have Redis's port."""
    if choices.redis_port is None:
        raise StackError("Redis's port has not been chosen")
    port = choices.redis_port
    settings = {
        "bind": HOST, "port": port, "dir": folder, "daemonize": "no", "save": "", "appendonly": "no",
        "maxmemory": f"{max_memory_mib}mb", "maxmemory-policy": "allkeys-lru", "loglevel": "warning",
    }  # fmt: skip
    command = [str(server)]
    for key, value in settings.items():
        command += [f"--{key}", str(value)]

    def ask() -> bool:
        from redis import Redis
        from redis.exceptions import ConnectionError as RedisConnectionError
        from redis.exceptions import TimeoutError as RedisTimeoutError

        with Redis(host=HOST, port=port, socket_timeout=2.0, socket_connect_timeout=2.0) as client:
            try:
                return bool(client.ping())
            except (RedisConnectionError, RedisTimeoutError):
                return False

    return Service("redis", f"{HOST}:{port}", command, lambda: folder.mkdir(parents=True, exist_ok=True), ask)
