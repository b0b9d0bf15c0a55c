"""Settings of the feedback gateway."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from rollwire.producers.gateway.key_store import KeysConfig
from rollwire.producers.gateway.quotas import QuotasConfig
from rollwire.producers.gateway.repeats import RepeatsConfig
from rollwire.producers.gateway.tls import TlsConfig


class GatewayConfig(BaseModel):
    """What one gateway process takes, holds and waits for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8300, ge=0, le=65_535, description="port to listen on; 0 = a free one")
    rules: Path | None = Field(
        None, description="TOML file of the signals that are taken; none: the built-in ones"
    )
    max_body_bytes: int = Field(
        4 * 1024 * 1024, ge=1, description="of a request, as sent and inflated: 413 above"
    )
    max_items: int = Field(5_000, ge=1, description="events of a batch: 413 above")
    max_comment_bytes: int = Field(32 * 1024, ge=1, le=64 * 1024, description="UTF-8 bytes of one comment")
    max_bodies_bytes: int = Field(
        32 * 1024 * 1024, ge=1, description="bodies held at once, all requests together: 503 above"
    )
    queue_events: int = Field(20_000, ge=1, description="events that wait for the broker: 503 above")
    queue_bytes: int = Field(64 * 1024 * 1024, ge=1, description="their bytes: 503 above")
    commit_events: int = Field(4_000, ge=1, description="events of one write, at most (or one request's)")
    deadline_s: float = Field(
        10.0, gt=0, description="from a whole request to its answer: 503 after, its outcome unknown"
    )
    body_timeout_s: float = Field(10.0, gt=0, description="from a request's head to its last byte: 408 after")
    retry_after_s: float = Field(1.0, ge=0, description="what a 503 tells the caller to wait")
    max_skew_s: float = Field(
        300.0,
        ge=0,
        le=300,  # what attribution allows: beyond it an event would be acknowledged, and a dead letter
        description="how far ahead of this clock an event may be, and ahead of its rollout's opening",
    )
    open_metrics: bool = Field(
        True,
        description="whether /metrics needs no key (no event's content is in it); false: one with the scope metrics",
    )
    stop_s: float = Field(6.0, gt=0, le=7, description="to answer what is in flight when told to stop")
    open_to_all: bool = Field(
        False,
        description="no API keys: everyone who reaches it is the tenant below; on this machine's own address only",
    )
    tenant: str = Field(
        "default", pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,63}$", description="of callers without keys"
    )
    origins: tuple[str, ...] = Field(
        (), description="pages that may call without a key: https://app.example.com"
    )
    tls: TlsConfig | None = Field(None, description="certificate and key; none: plain HTTP")
    behind_proxy: bool = Field(False, description="a proxy in front ends TLS, so plain HTTP is meant")
    keys: KeysConfig = Field(KeysConfig(), description="where API keys stand, how soon a change is noticed")
    quotas: QuotasConfig = QuotasConfig()
    repeats: RepeatsConfig = RepeatsConfig()
    hints_timeout_s: float = Field(0.02, gt=0, description="of one call to Redis, which may be away")
