"""Which pages may call, and what their browsers are told."""

from __future__ import annotations

import pytest

from rollwire.producers.gateway.origins import (
    answer_headers,
    origin_allowed,
    parse_origin,
    parse_origins,
    preflight_headers,
)
from rollwire.schemas.errors import ConfigError

PAGE = "https://app.example.com"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (PAGE, PAGE),
        (PAGE + "/", PAGE),
        ("HTTPS://App.Example.COM:443", PAGE),
        ("http://localhost:3000", "http://localhost:3000"),
        ("http://[::1]:80", "http://[::1]"),
        ("https://*.example.com", "https://*.example.com"),
        ("*", "*"),
    ],
)
def test_an_origin_is_read_as_browsers_write_it(text: str, meant: str) -> None:
    assert parse_origin(text) == meant


@pytest.mark.parametrize(
    "text",
    [
        "", "app.example.com", "https://", "https://app.example.com/path", "https://app.example.com?q", "ftp://app.example.com",
        "https://me@app.example.com", "https://*", "https://*.com", "https://a.*.com", "https://**.example.com", "null",
        "https://app.example.com:port", "https://app.example.com:99999", "https://[::1",
    ],
)  # fmt: skip
def test_what_is_no_origin_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_origin(text)


def test_a_wild_origin_is_every_name_below_and_no_other() -> None:
    allowed = parse_origins(["https://*.example.com", "http://localhost:3000", "http://localhost:3000"])
    assert len(allowed) == 2
    for origin in (PAGE, "https://a.b.example.com", "http://localhost:3000"):
        assert origin_allowed(origin, allowed), origin
    for origin in (
        "https://example.com", "http://app.example.com", "https://app.example.com:8443", "https://evilexample.com",
        "https://app.example.com.evil.test", "http://localhost:3001", "null", "", "https://", "example.com",
        "https://evil.test/.example.com",
    ):  # fmt: skip
        assert not origin_allowed(origin, allowed), origin
    assert origin_allowed("null", ["*"])


def test_a_page_learns_why_it_was_refused_and_a_stranger_nothing() -> None:
    assert answer_headers(None, False) == []
    allowed = dict(answer_headers(PAGE, True))
    assert allowed["access-control-allow-origin"] == PAGE
    assert allowed["vary"] == "origin"
    assert "access-control-allow-credentials" not in allowed
    assert "x-request-id" in allowed["access-control-expose-headers"]
    assert dict(answer_headers(PAGE, False)) == {"vary": "origin"}
    preflight = dict(preflight_headers(PAGE, True))
    assert "POST" in preflight["access-control-allow-methods"]
    for header in ("authorization", "content-type", "content-encoding"):
        assert header in preflight["access-control-allow-headers"]
    assert dict(preflight_headers(PAGE, False)) == {"vary": "origin"}
    assert preflight_headers(None, False) == []
