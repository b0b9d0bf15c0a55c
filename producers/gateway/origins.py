"""Pages that may call the gateway: which origins, and the headers by which a browser learns it (CORS; Fetch standard, 3.2).

Keys travel in a header or in the address, never in a cookie: a page of another origin cannot borrow a reader's login, so
answers never carry `Access-Control-Allow-Credentials`. An origin is no secret, and what is no browser may claim any: the list
keeps a publishable key out of other people's pages, no more.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final
from urllib.parse import urlsplit

from rollwire.schemas.errors import ConfigError

ANY: Final = "*"
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_HOST: Final = re.compile(r"[a-z0-9.-]+(:\d+)?")
_METHODS: Final = "GET, POST, OPTIONS"
_HEADERS: Final = "authorization, content-encoding, content-type, x-request-id"
_EXPOSED: Final = "retry-after, x-request-id"
_PREFLIGHT_S: Final = (
    "600"  # how long a browser may remember the answer: a revoked origin is told at the request anyway
)


def parse_origin(text: str) -> str:
    """An origin as browsers write it: `https://app.example.com[:port]`; also `https://*.example.com` for every name below,
    and `*` for every page. Raises `ConfigError` for anything else."""
    if text == ANY:
        return text
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise ConfigError(f"origin {text!r}: {error}") from error
    rest = parts.path.rstrip("/") + parts.query + parts.fragment + (parts.username or "")
    wild = host.startswith("*.")
    bare = host.removeprefix("*.")
    if parts.scheme not in _DEFAULT_PORTS or not bare or rest or "*" in bare or (wild and "." not in bare):
        raise ConfigError(
            f"origin {text!r} is not of the form https://host[:port], https://*.domain or * (no path, no user)"
        )
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}" + (
        "" if port is None or port == _DEFAULT_PORTS[parts.scheme] else f":{port}"
    )


def origin_allowed(origin: str, allowed: Collection[str]) -> bool:
    """`origin` is a header as a browser sent it; `allowed` are results of `parse_origin`. "null" (a file, a sandboxed
    frame) is allowed by `*` only."""
    if origin in allowed or ANY in allowed:
        return True
    scheme, _, host = origin.partition("://")
    while _HOST.fullmatch(host) and "." in host:
        host = host.split(".", 1)[1]
        if f"{scheme}://*.{host}" in allowed:
            return True
    return False


def answer_headers(origin: str | None, allowed: bool) -> list[tuple[str, str]]:
    """What every answer to a page carries, refusals too: without it the page could not read why."""
    if origin is None:
        return []
    headers = [("vary", "origin")]
    if allowed:
        headers += [("access-control-allow-origin", origin), ("access-control-expose-headers", _EXPOSED)]
    return headers


def preflight_headers(origin: str | None, allowed: bool) -> list[tuple[str, str]]:
    """The answer to `OPTIONS`, which carries no key: `allowed` is whether any key lists the origin."""
    headers = answer_headers(origin, allowed)
    if origin is not None and allowed:
        headers += [
            ("access-control-allow-methods", _METHODS),
            ("access-control-allow-headers", _HEADERS),
            ("access-control-max-age", _PREFLIGHT_S),
        ]
    return headers


def parse_origins(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(parse_origin(text) for text in texts))
