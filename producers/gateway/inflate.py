"""Bodies that were sent compressed: gzip and zstd, inflated piece by piece under a limit (C76, C79, C82)."""

from __future__ import annotations

import zlib
from typing import Final

import zstandard

from rollwire.producers.gateway.access import Refusal

MAX_WINDOW_BYTES: Final = 8 * 1024 * 1024  # what RFC 9659 allows a zstd body on the web to ask for
MAX_FRAMES: Final = 64  # each costs a copy of the rest: a body of empty ones must not cost its square
_PIECE: Final = 64 * 1024
# A block of 4 bytes may stand for 128 KiB, and one call gives all that its input stands for: 8 MiB at most.
_ZSTD_PIECE: Final = 256
_GZIP: Final = 16 + zlib.MAX_WBITS
ENCODINGS: Final = ("gzip", "zstd")


def inflate(body: bytes, encoding: str, most: int) -> bytes | Refusal:
    """The body as it was before; `encoding` is the Content-Encoding header in lower case.

    Several members or frames are one body. Never holds more than `most` bytes and a piece.
    """
    match encoding:
        case "" | "identity":
            return body
        case "gzip" | "x-gzip":
            return _gzip(body, most)
        case "zstd":
            return _zstd(body, most)
        case _:
            return Refusal(
                415, "encoding_unknown", f"Content-Encoding {encoding[:80]!r}: send gzip, zstd or none"
            )


def _gzip(body: bytes, most: int) -> bytes | Refusal:
    out = bytearray()
    rest = body
    try:
        for _ in range(MAX_FRAMES):
            if not rest:
                return bytes(out)
            member = zlib.decompressobj(_GZIP)
            while not member.eof:
                piece = member.decompress(rest, min(_PIECE, most - len(out) + 1))
                rest = member.unconsumed_tail
                out += piece
                if len(out) > most:
                    return _too_large(most)
                if not piece and not member.eof:
                    return Refusal(400, "encoding_invalid", "the gzip body ends in the middle")
            rest = member.unused_data
    except zlib.error as error:
        return Refusal(400, "encoding_invalid", f"no gzip: {error}")
    return bytes(out) if not rest else _too_many()


def _zstd(body: bytes, most: int) -> bytes | Refusal:
    out = bytearray()
    rest = body
    try:
        for _ in range(MAX_FRAMES):
            if not rest:
                return bytes(out)
            window = zstandard.get_frame_parameters(rest).window_size
            if window > MAX_WINDOW_BYTES:
                detail = (
                    f"the zstd frame asks for a window of {window} bytes, the limit is {MAX_WINDOW_BYTES}"
                )
                return Refusal(413, "too_large", detail)
            frame = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj()
            at = 0
            while not frame.eof:
                if at >= len(rest):
                    return Refusal(400, "encoding_invalid", "the zstd body ends in the middle")
                out += frame.decompress(rest[at : at + _ZSTD_PIECE])
                at += _ZSTD_PIECE
                if len(out) > most:
                    return _too_large(most)
            rest = frame.unused_data + rest[at:]
    except (zstandard.ZstdError, MemoryError) as error:
        return Refusal(400, "encoding_invalid", f"no zstd: {error}")
    return bytes(out) if not rest else _too_many()


def _too_large(most: int) -> Refusal:
    return Refusal(413, "too_large", f"the body inflates to more than {most} bytes")


def _too_many() -> Refusal:
    return Refusal(
        400, "encoding_invalid", f"more than {MAX_FRAMES} compressed members or frames in one body"
    )
