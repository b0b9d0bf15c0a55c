"""Moments as people write them."""

from __future__ import annotations

from datetime import UTC, datetime

from rollwire.schemas.errors import ConfigError


def moment_of(text: str, option: str = "", *, also: str = "") -> datetime:
    """RFC 3339, or as much of it as is needed; without a zone: UTC. `option` that it was said with, and what it `also` may be, are
    for the message of the `ConfigError` that anything else raises."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        said = f"{option} {text!r}".strip()
        raise ConfigError(
            f"{said} is no time; one is 2026-11-30T06 or 2026-11-30T06:30+08:00 (without a zone: UTC){also}"
        ) from None
    return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
