"""zstd frames, one compressor and one decompressor a thread (C81), sizes checked before a byte is unpacked (C79, C82)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import zstandard

from rollwire.schemas.errors import DeltaCorrupt

LEVEL: Final = 1  # higher levels make deltas no smaller and are slower
MAX_WINDOW: Final = 1 << 23  # bytes; what level 1 writes stays far below


class _Local(threading.local):
    def __init__(self) -> None:
        self.compress: Callable[[bytes | bytearray | memoryview], bytes] = zstandard.ZstdCompressor(
            level=LEVEL
        ).compress
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)


_local = _Local()


def pack(raw: bytes | bytearray | memoryview) -> bytes:
    """One frame that states its content's size."""
    return _local.compress(raw)


def unpack(frame: bytes | memoryview, raw_size: int) -> bytes:
    """The content of exactly one frame of exactly `raw_size` bytes. Raises `DeltaCorrupt` otherwise."""
    try:
        stated = zstandard.frame_content_size(frame)
        if stated != raw_size:
            raise DeltaCorrupt(f"a zstd frame states {stated} bytes, the header {raw_size}")
        raw = _local.decompressor.decompress(frame, max_output_size=raw_size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DeltaCorrupt(f"a zstd frame does not unpack: {error}") from error
    if len(raw) != raw_size:
        raise DeltaCorrupt(f"a zstd frame unpacked to {len(raw)} bytes, the header says {raw_size}")
    return raw
