"""What the gateway needs of a request's head, out of an ASGI scope."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import count
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

# ASGI's own types, without a dependency for them.
Scope = dict[str, Any]
Headers = Iterable[tuple[bytes, bytes]]

_FIELDS: Final = 16
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


_READ: Final = frozenset(
    (b"content-length", b"content-type", b"authorization", b"content-encoding", b"origin", b"x-request-id")
)


class Head(msgspec.Struct, frozen=True, gc=False):
    request_id: str
    authorization: str | None
    origin: str | None
    media_type: str  # lower case, without parameters; "" = not said
    encoding: str  # lower case; "" = none
    length: int | None  # None = not said (chunked), or nonsense: then the bytes are counted
    address_key: str | None


class RequestIds:
    """An id for every answer: the caller's own where it sent a good one, else the next of this process."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._next = count(1)

    def new(self) -> str:
        return f"{self._process}-{next(self._next):x}"


def read_head(scope: Scope, ids: RequestIds) -> Head:
    request_id = authorization = origin = None
    media_type = encoding = ""
    length: int | None = None
    for name, value in scope["headers"]:
        if name not in _READ:
            continue
        if name == b"content-length":
            length = int(value) if value.isdigit() else None
        elif name == b"content-type":
            media_type = _media_type(value)
        elif name == b"authorization":
            authorization = value.decode("latin-1")
        elif name == b"content-encoding":
            encoding = value.decode("latin-1").strip().lower()
        elif name == b"origin":
            origin = value.decode("latin-1")
        elif name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            request_id = value.decode()
    query = scope["query_string"]
    return Head(
        request_id or ids.new(),
        authorization,
        origin,
        media_type,
        encoding,
        length,
        _address_key(query) if query else None,
    )


@lru_cache(maxsize=256)
def _media_type(value: bytes) -> str:
    return value.decode("latin-1").partition(";")[0].strip().lower()


def _address_key(query: bytes) -> str | None:
    try:
        values = parse_qs(query.decode("latin-1"), max_num_fields=_FIELDS).get("key")
    except ValueError:
        return None  # an address of so many fields holds no key of ours
    return values[0] if values else None
