"""Redis behind the cache seam. Nothing here may be needed: a Redis that is away costs a look, never a result (law 1)."""

from __future__ import annotations

from typing import Final

import redis
import structlog

_logger = structlog.get_logger("rollwire.cache")
_TIMEOUT_S: Final = 2.0


class RedisCache:
    """A failed call is logged and answers as if the value were not there. Thread-safe."""

    def __init__(self, url: str) -> None:
        self._redis = redis.Redis.from_url(
            url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S, health_check_interval=30
        )

    def set(self, key: str, value: bytes, ttl_s: float | None = None) -> None:
        try:
            self._redis.set(key, value, px=None if ttl_s is None else max(1, round(ttl_s * 1_000)))
        except redis.RedisError as failure:
            _lost("set", failure)

    def get(self, key: str) -> bytes | None:
        try:
            value = self._redis.get(key)
        except redis.RedisError as failure:
            _lost("get", failure)
            return None
        return value if isinstance(value, bytes) else None

    def set_many(self, values: dict[str, bytes]) -> None:
        if not values:
            return
        try:
            self._redis.mset(dict(values))
        except redis.RedisError as failure:
            _lost("set_many", failure)

    def get_prefix(self, prefix: str) -> dict[str, bytes]:
        escaped = "".join(f"\\{c}" if c in "*?[]\\" else c for c in prefix)
        try:
            keys = sorted(
                key for key in self._redis.scan_iter(match=f"{escaped}*", count=500) if isinstance(key, bytes)
            )
            found = self._redis.mget(keys) if keys else []
        except redis.RedisError as failure:
            _lost("get_prefix", failure)
            return {}
        values = found if isinstance(found, list) else []
        return {k.decode(): v for k, v in zip(keys, values, strict=True) if isinstance(v, bytes)}

    def purge(self, text: str) -> int | None:
        wanted, purged = text.encode(), 0
        try:
            for key in self._redis.scan_iter(count=500):
                if isinstance(key, bytes) and (wanted in key or wanted in self._whole(key)):
                    purged += int(self._redis.delete(key))
        except redis.RedisError as failure:
            _lost("purge", failure)
            return None
        return purged

    def _whole(self, key: bytes) -> bytes:
        """All that stands under a key, whatever its type; of a type that is not known, how Redis would write it to disk."""
        kind: object = self._redis.type(key)
        match kind:
            case b"string":
                found: object = [self._redis.get(key)]
            case b"hash":
                found = [part for pair in self._redis.hscan_iter(key) for part in pair]
            case b"set":
                found = list(self._redis.sscan_iter(key))
            case b"zset":
                found = [member for member, _ in self._redis.zscan_iter(key)]
            case b"list":
                found = self._redis.lrange(key, 0, -1)
            case _:
                found = [self._redis.dump(key)]
        parts = found if isinstance(found, list) else []
        return b"\0".join(part for part in parts if isinstance(part, bytes))

    def close(self) -> None:
        self._redis.close()


def _lost(call: str, failure: redis.RedisError) -> None:
    _logger.warning("cache.unavailable", call=call, error=str(failure))
