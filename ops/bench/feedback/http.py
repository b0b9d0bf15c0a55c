"""As much HTTP/1.1 as a load generator needs: an ask as bytes, an answer out of bytes.

No client library is fast enough to press a server on a machine that both share. Answers must state their length, as those of the
gateway do; one that does not is an error of the run, not of the ask.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from rollwire.schemas.errors import LogError

_LENGTH: Final = b"\r\ncontent-length:"
_RETRY: Final = b"\r\nretry-after:"
_CLOSE: Final = b"\r\nconnection: close"
_BODILESS: Final = frozenset({204, 304})


class Answer(NamedTuple):
    status: int
    body: bytes
    retry_after_s: float | None
    closes: bool  # the server takes no further ask on this connection


def request(
    method: str, path: str, host: str, body: bytes = b"", headers: tuple[tuple[str, str], ...] = ()
) -> bytes:
    """One request on a keep-alive connection."""
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}", *(f"{name}: {value}" for name, value in headers)]
    if body or method == "POST":
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def parse_answer(buffer: bytes | bytearray) -> tuple[Answer, int] | None:
    """The first answer in `buffer` and where it ends; None while it is not whole. Raises `LogError` for what is none."""
    head_end = buffer.find(b"\r\n\r\n")
    if head_end < 0:
        return None
    head = bytes(buffer[:head_end]).lower()
    if not head.startswith(b"http/1.1 ") or not head[9:12].isdigit():
        raise LogError(f"no HTTP/1.1 answer: {bytes(buffer[:80])!r}")
    status = int(head[9:12])
    length = _field(head, _LENGTH)
    if length is None and status not in _BODILESS:
        raise LogError(f"an answer {status} without content-length: {bytes(buffer[:200])!r}")
    start = head_end + 4
    end = start + int(length or 0)
    if len(buffer) < end:
        return None
    retry = _field(head, _RETRY)
    return (
        Answer(status, bytes(buffer[start:end]), None if retry is None else float(retry), _CLOSE in head),
        end,
    )


def _field(head: bytes, name: bytes) -> bytes | None:
    at = head.find(name)
    if at < 0:
        return None
    start = at + len(name)
    end = head.find(b"\r\n", start)
    return head[start : len(head) if end < 0 else end].strip()
