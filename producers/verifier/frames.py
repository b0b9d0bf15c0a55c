"""What the verifier and its evaluator say to each other: length-prefixed MessagePack frames over one socket pair.

Both sides check every frame: the evaluator reads text that a policy wrote, and the verifier reads what a process
that may have been subverted by such text wrote.
"""

from __future__ import annotations

import math
import socket
import struct
from typing import Final, NamedTuple

import msgspec

_LENGTH: Final = struct.Struct("<I")
READY: Final = b"\x01"  # the evaluator's first byte: loaded and limited
MAX_FRAME: Final = 64 * 1024 * 1024  # bytes of a batch of requests
MAX_REPLY: Final = 64 * 1024  # bytes of one reply


class ScoreRequest(NamedTuple):
    task: str
    sampled_ids: bytes  # little-endian i8 [S]
    finish_reason: str


class ScoreReply(NamedTuple):
    position: int  # of the request in its batch
    reward: float | None
    components: tuple[tuple[str, float], ...]
    outcome: str


class BadFrame(Exception):
    """The other side did not keep to the protocol; it is ended. Never leaves this package."""


_requests = msgspec.msgpack.Decoder(list[ScoreRequest])
_reply = msgspec.msgpack.Decoder(ScoreReply)
_encoder = msgspec.msgpack.Encoder()


def encode_requests(requests: list[ScoreRequest]) -> bytes:
    body = _encoder.encode(requests)
    return _LENGTH.pack(len(body)) + body


def decode_requests(body: bytes) -> list[ScoreRequest]:
    return _requests.decode(body)


def encode_reply(reply: ScoreReply) -> bytes:
    body = _encoder.encode(reply)
    return _LENGTH.pack(len(body)) + body


def decode_reply(body: bytes, expected_index: int) -> ScoreReply:
    """Raises `BadFrame` for anything but a well-formed reply to that request."""
    try:
        reply = _reply.decode(body)
    except msgspec.DecodeError as error:
        raise BadFrame(f"undecodable reply: {error}") from error
    if reply.position != expected_index:
        raise BadFrame(f"reply to request {reply.position}, expected {expected_index}")
    numbers = [value for _, value in reply.components]
    if reply.reward is not None:
        numbers.append(reply.reward)
    if not all(math.isfinite(number) for number in numbers):
        raise BadFrame("a reward or component that is not finite")
    return reply


class FrameReader:
    """Cuts a byte stream into frames, with a limit on each."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> bytes | None:
        """The next whole frame's body, or None when more bytes are needed. Raises `BadFrame` above the limit."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self._limit:
            raise BadFrame(f"a frame of {length} bytes, the limit is {self._limit}")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return body


def receive_frame(connection: socket.socket, reader: FrameReader) -> bytes | None:
    """The next frame, waiting as the socket's own time-out says; None at the end of the stream."""
    while (body := reader.next()) is None:
        data = connection.recv(256 * 1024)
        if not data:
            return None
        reader.feed(data)
    return body
