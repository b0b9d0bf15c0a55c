"""A segment of the spool, as text: lines that can be read with `less`, each with its checksum. Pure.

    rollwire-spool 1 00000000000001a4 5e1f2c77
    3d1c6a02 {"feedback_id":"0193...","rollout_id":"...","signal":"thumb","value":1}
    ...

The head names the position below which everything is settled, and that position's own checksum. It is rewritten in place and never
forced to disk: a lost one only sends events again, under the ids that they have, so nothing counts twice. A line is whole if it
ends and its checksum (CRC-32 of what follows it) holds. A last line without an end is torn: its `send` never returned.
"""

from __future__ import annotations

import zlib
from typing import Final, NamedTuple

_MAGIC: Final = b"rollwire-spool 1 "
HEAD_BYTES: Final = len(_MAGIC) + 16 + 1 + 8 + 1


class Lines(NamedTuple):
    """What was read of a segment from one position."""

    whole: tuple[bytes, ...]  # events, without checksum and line end
    damaged: int  # lines that end, but whose checksum does not hold
    end: int  # position behind the last line that ends; what follows, if anything, is torn or not read yet


def head(position: int) -> bytes:
    """The first line: `position` is a number of bytes from the start of the file."""
    digits = b"%016x" % position
    return _MAGIC + digits + b" %08x\n" % zlib.crc32(digits)


def read_head(data: bytes) -> int | None:
    """The settled position, the first line's end where its checksum does not hold (a write that a power cut tore);
    None where this is no segment of ours."""
    if not data.startswith(_MAGIC) or len(data) < HEAD_BYTES:
        return None
    digits = data[len(_MAGIC) : len(_MAGIC) + 16]
    try:
        position, checksum = int(digits, 16), int(data[len(_MAGIC) + 17 : HEAD_BYTES - 1], 16)
    except ValueError:
        return HEAD_BYTES
    return position if checksum == zlib.crc32(digits) and position >= HEAD_BYTES else HEAD_BYTES


def line(event: bytes) -> bytes:
    """An event's line; `event` holds no line end."""
    return b"%08x %b\n" % (zlib.crc32(event), event)


def read_lines(data: bytes, position: int, max_lines: int) -> Lines:
    """The lines of `data`, which starts at `position` of its segment; at most `max_lines` whole ones."""
    whole: list[bytes] = []
    damaged = 0
    start = 0
    while len(whole) < max_lines:
        stop = data.find(b"\n", start)
        if stop < 0:
            break
        event = data[start + 9 : stop]
        if data[start : start + 9] == b"%08x " % zlib.crc32(event):
            whole.append(event)
        else:
            damaged += 1
        start = stop + 1
    return Lines(tuple(whole), damaged, position + start)
