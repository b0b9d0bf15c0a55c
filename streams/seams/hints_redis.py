"""Redis behind the hints seam: one script call for many digests, one for each lease, by Redis's own clock.

A call that fails is logged once an outage and costs at most `timeout_s`; then none is tried for a while, which doubles
up to `RETRY_MAX_S`. The scripts make the names of their keys, so this is for one Redis server, not for a cluster of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import redis
import structlog
from redis.backoff import NoBackoff
from redis.retry import Retry

from rollwire.streams.seams.hints import WIDTH, Lease, Leased

_logger = structlog.get_logger("rollwire.hints")
_T = TypeVar("_T")
CHUNK: Final = 2_000  # names of one script call: Redis serves nobody else meanwhile (2 to 5 ms); Lua unpacks 7,999 at most
RETRY_S: Final = 0.25
RETRY_MAX_S: Final = 4.0

_GET: Final = """
local names, n = {}, 0
for at = 1, #ARGV[2], 16 do
  n = n + 1
  names[n] = ARGV[1] .. string.sub(ARGV[2], at, at + 15)
end
if n == 0 then return '' end
local out, none = redis.call('MGET', unpack(names)), string.rep('\\0', 16)
for i = 1, n do
  out[i] = out[i] or none
end
return table.concat(out)
"""
_PUT: Final = """
for at = 1, #ARGV[2], 16 do
  redis.call('SET', ARGV[1] .. string.sub(ARGV[2], at, at + 15), string.sub(ARGV[3], at, at + 15), 'PX', ARGV[4])
end
"""
# Numbers are written with a format: Lua's own keeps 14 digits, too few for microseconds.
_LEASE: Final = """
local rate, burst, spent, want = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local was = redis.call('HMGET', KEYS[1], 'tokens', 'at')
local tokens = tonumber(was[1] or burst)
tokens = math.min(burst, tokens + math.max(0, now - tonumber(was[2] or now)) * rate / 1000000) - spent
local granted = math.max(0, math.min(want, math.floor(tokens)))
tokens = tokens - granted
redis.call('HSET', KEYS[1], 'tokens', string.format('%.6f', tokens), 'at', string.format('%.0f', now))
redis.call('PEXPIRE', KEYS[1], string.format('%.0f', math.min(86400000, (burst - tokens) / rate * 1000 + 60000)))
return {granted, string.format('%.6f', math.max(0, (1 - tokens) / rate))}
"""


class RedisHints:
    """`prefix` keeps stacks on one Redis apart. `timeout_s` bounds each call. Thread-safe."""

    def __init__(self, url: str, prefix: str, *, timeout_s: float) -> None:
        self._prefix = prefix.encode()
        self._redis = redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
        self._get = self._redis.register_script(_GET)
        self._put = self._redis.register_script(_PUT)
        self._lease = self._redis.register_script(_LEASE)
        self._lock = threading.Lock()
        self._away_until_s = 0.0
        self._retry_s = RETRY_S

    def digests(self, names: bytes) -> bytes | None:
        def ask() -> bytes:
            found = b""
            for at in range(0, len(names), CHUNK * WIDTH):
                answer = self._get(args=[self._prefix + b"d:", names[at : at + CHUNK * WIDTH]])
                found += bytes(answer)
            return found

        return self._asked("digests", ask)

    def put_digests(self, names: bytes, digests: bytes, ttl_s: float) -> None:
        lives_ms = max(1, round(ttl_s * 1_000))

        def ask() -> None:
            for at in range(0, len(names), CHUNK * WIDTH):
                until = at + CHUNK * WIDTH
                self._put(args=[self._prefix + b"d:", names[at:until], digests[at:until], lives_ms])

        self._asked("put_digests", ask)

    def lease(self, leases: Sequence[Lease]) -> list[Leased] | None:
        def ask() -> list[Leased]:
            answers: list[Leased] = []
            for lease in leases:
                granted, wait_s = self._lease(
                    keys=[self._prefix + b"q:" + lease.name.encode()],
                    args=[repr(float(lease.rate)), lease.burst, repr(float(lease.spent)), lease.want],
                )
                answers.append(Leased(int(granted), float(wait_s)))
            return answers

        return self._asked("lease", ask)

    def close(self) -> None:
        self._redis.close()

    def _asked(self, call: str, ask: Callable[[], _T]) -> _T | None:
        if time.monotonic() < self._away_until_s:
            return None
        try:
            answer = ask()
        except redis.RedisError as failure:
            with self._lock:
                first = self._retry_s == RETRY_S
                self._away_until_s = time.monotonic() + self._retry_s
                self._retry_s = min(RETRY_MAX_S, self._retry_s * 2)
            if first:
                _logger.warning("hints.unavailable", call=call, error=str(failure))
            return None
        if self._retry_s != RETRY_S:
            with self._lock:
                self._retry_s = RETRY_S
            _logger.info("hints.back", call=call)
        return answer
