"""The doors of a feedback gateway, opened on a stack: keys from its store, quotas and repeats shared by its Redis."""

from __future__ import annotations

from typing import Final, NamedTuple

from rollwire.ops.stack import StackInfo
from rollwire.producers.gateway.key_store import KeysConfig, StoredKeys
from rollwire.producers.gateway.quotas import LeasedQuotas, QuotasConfig
from rollwire.producers.gateway.repeats import CachedRepeats, RepeatsConfig
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.hints_redis import RedisHints
from rollwire.streams.seams.store_s3 import S3Store

_STORE_S: Final = 2.0  # of a poll for keys: a change is known within `poll_s` and this
_REPEATS_S: Final = 0.02  # the commit thread waits for it
_LEASES_S: Final = 0.25  # a thread of its own waits for it


class Limits(NamedTuple):
    access: StoredKeys
    quotas: LeasedQuotas
    repeats: CachedRepeats
    hints: tuple[RedisHints, RedisHints]

    def close(self) -> None:
        self.access.close()
        self.quotas.close()
        for hints in self.hints:
            hints.close()


def open_limits(
    stack: StackInfo,
    prefix: str,
    *,
    bucket: str | None = None,
    redis_url: str | None = None,
    keys: KeysConfig | None = None,
    quotas: QuotasConfig | None = None,
    repeats: RepeatsConfig | None = None,
) -> Limits:
    """`prefix` is that of the topics: gateways of one prefix share quotas and repeats. Keys are those of the bucket."""
    store = S3Store(
        stack.s3_endpoint,
        bucket or stack.bucket,
        stack.access_key,
        stack.secret_key,
        stack.region,
        timeout_s=_STORE_S,
        read_timeout_s=_STORE_S,
    )
    clock = SystemClock()
    url = redis_url or stack.redis_url
    patient = RedisHints(url, f"{prefix}gateway.", timeout_s=_LEASES_S)
    quick = RedisHints(url, f"{prefix}gateway.", timeout_s=_REPEATS_S)
    return Limits(
        StoredKeys(store, keys or KeysConfig(), clock),
        LeasedQuotas(patient, quotas or QuotasConfig(), clock),
        CachedRepeats(quick, repeats or RepeatsConfig()),
        (patient, quick),
    )
