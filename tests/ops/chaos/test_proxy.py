"""The proxy's parser of frames."""

from __future__ import annotations

import struct

import pytest

from rollwire.ops.chaos.proxy import END_TXN, EndTxn, Request, error_code, parse_end_txn, parse_request

V1 = (
    struct.pack(">hhih", END_TXN, 1, 7, 3)
    + b"app"
    + struct.pack(">h", 9)
    + b"assemble."
    + struct.pack(">qh?", 4000, 3, True)
)
V4 = (
    struct.pack(">hhih", END_TXN, 4, 8, 3)
    + b"app\x00"
    + bytes([10])
    + b"assemble."
    + struct.pack(">qh?", 4000, 3, False)
    + b"\x00"
)


@pytest.mark.parametrize(("frame", "version", "committed"), [(V1, 1, True), (V4, 4, False)])
def test_end_txn(frame: bytes, version: int, committed: bool) -> None:
    request = parse_request(frame)
    assert request == Request(END_TXN, version, 7 if version == 1 else 8, "app", frame)
    assert parse_end_txn(request) == EndTxn("assemble.", 4000, 3, committed)


def test_a_client_without_a_name() -> None:
    assert parse_request(struct.pack(">hhih", 3, 12, 1, -1)).client_id == ""


@pytest.mark.parametrize("frame", [b"", b"\x00\x1a\x00", struct.pack(">hhih", END_TXN, 1, 7, 9) + b"app"])
def test_no_request(frame: bytes) -> None:
    with pytest.raises(ValueError, match="header"):
        parse_request(frame)


@pytest.mark.parametrize("cut", range(15, len(V1) - 1))
def test_a_short_end_txn(cut: int) -> None:
    with pytest.raises(ValueError, match="ends after"):
        parse_end_txn(parse_request(V1[:cut]))


def test_another_request_is_no_end_txn() -> None:
    with pytest.raises(ValueError, match="no EndTxn"):
        parse_end_txn(parse_request(struct.pack(">hhih", 0, 9, 1, -1)))


def test_error_codes() -> None:
    assert error_code(struct.pack(">iih", 7, 0, 47), 1) == 47
    assert error_code(struct.pack(">ibih", 7, 0, 0, 90), 4) == 90
