"""Key to partition, as Kafka's Java client does it: murmur2 of the key, sign bit cleared, modulo the partitions.

Every client of ours must agree, or a join silently misses: librdkafka is set to `partitioner=murmur2_random`
(its own default is CRC-32), Faust's aiokafka uses murmur2. Golden vectors are tested across all of them.
Source: org.apache.kafka.common.utils.Utils.murmur2 (seed 0x9747b28c).
"""

from __future__ import annotations

from typing import Final

_MASK: Final = 0xFFFFFFFF
_M: Final = 0x5BD1E995
_SEED: Final = 0x9747B28C


def murmur2(data: bytes) -> int:
    """The 32-bit hash, as an unsigned number."""
    length = len(data)
    h = (_SEED ^ length) & _MASK
    whole = length & ~3
    for i in range(0, whole, 4):
        k = int.from_bytes(data[i : i + 4], "little") * _M & _MASK
        k = (k ^ k >> 24) * _M & _MASK
        h = (h * _M & _MASK) ^ k
    if whole < length:
        h = (h ^ int.from_bytes(data[whole:], "little")) * _M & _MASK
    h = (h ^ h >> 13) * _M & _MASK
    return h ^ h >> 15


def partition_for(key: bytes, partitions: int) -> int:
    """The partition of a key among `partitions` (>= 1)."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions
