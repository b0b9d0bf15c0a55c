"""A transport under uvicorn's HTTP protocol, with one system call an answer instead of two.

uvicorn writes an answer's head and body apart, and uvloop sends each at once: two packets, and the caller is woken twice. Here a
head that announces a body waits for it: an application that sends both messages without a wait between them, as the gateway
does, has them sent as one. One that does not only delays its head until its body begins. An answer to HEAD must not state a
length: no body follows it.
"""

from __future__ import annotations

import asyncio
from typing import Final

_HEAD: Final = b"HTTP/1.1 "
_END: Final = b"\r\n\r\n"
_LENGTH: Final = b"\r\ncontent-length: "


class OneWriteTransport:
    """As much of a transport as uvicorn's HTTP protocol uses."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._write = transport.write
        self._head = b""
        self.is_closing = transport.is_closing
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading
        self.get_extra_info = transport.get_extra_info

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.endswith(_END) and data.startswith(_HEAD) and _LENGTH in data:
            self._head = data
            return
        self._write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._flush()
        self._transport.set_protocol(protocol)

    def _flush(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._write(head)
