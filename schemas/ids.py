"""Ids. A group id is a UUIDv7 (RFC 9562), a rollout id is `<group id>.<index>`.

So whoever holds a rollout id alone finds its group, its partition and the time its group was opened.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from rollwire.schemas.errors import Refused

_UUID7: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
# A canonical index: no sign, no leading zero, at most six digits. "07" would be a second name for "7".
_ROLLOUT: Final = re.compile(
    r"([0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12})\.(0|[1-9][0-9]{0,5})"
)
MAX_INDEX: Final = 999_999

# All events of a group name it, one after the other: it is looked at once.
_REMEMBERED: Final = 16_384
_CHARACTERS: Final = 36
# The indices of all but the largest groups, as they are written.
_INDICES: Final = {str(index): index for index in range(1_024)}


def new_group_id(time_us: int, random_bits: int) -> str:
    """A UUIDv7 of the millisecond of `time_us`; `random_bits` fills the rest: its lowest 74 bits are used.

    Pure: the caller draws the bits (`secrets.randbits(74)`, or a seeded generator in a simulation).
    Raises `ValueError` where the time does not fit 48 bits of milliseconds.
    """
    ms = time_us // 1_000
    if not 0 <= ms < 1 << 48:
        raise ValueError(f"time_us={time_us} does not fit a UUIDv7")
    bits = random_bits & ((1 << 74) - 1)
    value = ms << 80 | 0x7 << 76 | (bits >> 62) << 64 | 0b10 << 62 | (bits & ((1 << 62) - 1))
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def is_group_id(text: str) -> bool:
    """Whether `text` is a UUIDv7 in its one canonical, lower-case form."""
    return len(text) == _CHARACTERS and _is_uuid7(text)


@lru_cache(maxsize=_REMEMBERED)
def _is_uuid7(text: str) -> bool:
    return _UUID7.fullmatch(text) is not None


@lru_cache(maxsize=_REMEMBERED)
def opened_us(group_id: str) -> int:
    """When the group was opened: microseconds since the epoch, to the millisecond. Raises `Refused(id_invalid)`."""
    if not is_group_id(group_id):
        raise Refused("id_invalid", f"group id {group_id[:80]!r} is not a UUIDv7")
    return int(group_id[:8] + group_id[9:13], 16) * 1_000


def rollout_id(group_id: str, index: int) -> str:
    """`<group id>.<index>`. Raises `ValueError` where the index is outside [0, 999 999]."""
    if not 0 <= index <= MAX_INDEX:
        raise ValueError(f"index {index} is outside [0, {MAX_INDEX}]")
    return f"{group_id}.{index}"


def parse_rollout_id(rollout_id: str) -> tuple[str, int]:
    """(group id, index) of a rollout id. Raises `Refused(id_invalid)`."""
    group_id, _, digits = rollout_id.rpartition(".")
    index = _INDICES.get(digits)
    if index is not None and is_group_id(group_id):
        return group_id, index
    match = _ROLLOUT.fullmatch(rollout_id)
    if match is None:
        raise Refused("id_invalid", f"rollout id {rollout_id[:80]!r} is not <UUIDv7>.<index>")
    return match[1], int(match[2])
