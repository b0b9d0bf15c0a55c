"""An answer of uvicorn leaves in one piece."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from rollwire.ops.one_write import OneWriteTransport

HEAD = b"HTTP/1.1 200 OK\r\nx-request-id: 1\r\ncontent-length: 2\r\n\r\n"
BODILESS = b"HTTP/1.1 204 No Content\r\nx-request-id: 1\r\n\r\n"


class Wire:
    """The transport below: what was written, and what was done."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def write(self, data: bytes) -> None:
        self.done.append(data)

    def close(self) -> None:
        self.done.append("close")

    def set_protocol(self, protocol: object) -> None:
        self.done.append(protocol)

    def is_closing(self) -> bool:
        return "close" in self.done

    def pause_reading(self) -> None:
        self.done.append("pause")

    def resume_reading(self) -> None:
        self.done.append("resume")

    def get_extra_info(self, name: str) -> str:
        return name


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def transport(wire: Wire) -> OneWriteTransport:
    return OneWriteTransport(cast("asyncio.Transport", wire))


def test_head_and_body_are_one_write(wire: Wire, transport: OneWriteTransport) -> None:
    for _ in range(2):
        transport.write(HEAD)
        transport.write(b"{}")
    assert wire.done == [HEAD + b"{}"] * 2


def test_an_empty_body_sends_its_head(wire: Wire, transport: OneWriteTransport) -> None:
    transport.write(HEAD)
    transport.write(b"")
    assert wire.done == [HEAD]


@pytest.mark.parametrize(
    "data", [BODILESS, b"HTTP/1.1 100 Continue\r\n\r\n", HEAD + b"{}", b"{}\r\n\r\n", b""]
)
def test_what_needs_no_body_is_not_held_back(wire: Wire, transport: OneWriteTransport, data: bytes) -> None:
    transport.write(data)
    assert wire.done == [data]


def test_nothing_is_lost_at_the_end(wire: Wire, transport: OneWriteTransport) -> None:
    transport.write(HEAD)
    transport.close()
    assert wire.done == [HEAD, "close"]
    assert transport.is_closing()


def test_another_protocol_finds_the_head_sent(wire: Wire, transport: OneWriteTransport) -> None:
    protocol = asyncio.Protocol()
    transport.write(HEAD)
    transport.set_protocol(protocol)
    assert wire.done == [HEAD, protocol]
    transport.pause_reading()
    transport.resume_reading()
    assert wire.done[2:] == ["pause", "resume"]
    assert transport.get_extra_info("peername") == "peername"
