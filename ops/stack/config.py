"""Configuration of the local stack."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


def default_cache() -> Path:
    """Where downloads are kept for all stacks of a user: `$ROLLWIRE_CACHE`, else `$XDG_CACHE_HOME/rollwire`, else
    `~/.cache/rollwire`."""
    if own := os.environ.get("ROLLWIRE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollwire"


class StackConfig(BaseModel):
    """What a local stack may be told. A port that is not fixed is chosen once and kept across restarts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dir: Path = Field(
        default=Path(".rollwire"),
        description="folder of the stack's state: broker log, buckets, logs, stack.json",
    )
    kafka_port: int | None = Field(
        default=None, ge=1, le=65535, description="the broker's port; none: a free one"
    )
    controller_port: int | None = Field(
        default=None, ge=1, le=65535, description="the KRaft controller's port; none: a free one"
    )
    kafka_proxied: bool = Field(
        default=False,
        description="give the broker a second listener that advertises the port of a proxy, which the caller runs",
    )
    s3_port: int | None = Field(
        default=None, ge=1, le=65535, description="the S3 server's port; none: a free one"
    )
    redis_port: int | None = Field(default=None, ge=1, le=65535, description="Redis's port; none: a free one")
    kafka: str | None = Field(
        default=None, description="host:port of a Kafka that is there already; none: one is started"
    )
    s3: str | None = Field(
        default=None,
        description="URL of a store that is there already (http://host:port/bucket, s3://bucket); none: one is started",
    )
    redis: str | None = Field(
        default=None, description="URL of a Redis that is there already; none: one is started"
    )
    bucket: str = Field(
        default="rollwire", min_length=3, description="bucket that is made when the stack starts"
    )
    kafka_heap_mib: int = Field(default=512, ge=256, description="the broker's heap, MiB")
    s3_heap_mib: int = Field(default=512, ge=128, description="the S3 server's heap, MiB")
    redis_max_memory_mib: int = Field(
        default=256, ge=16, description="Redis evicts the least recently used above this, MiB"
    )
    start_deadline_s: float = Field(
        default=90.0, gt=0, description="every service answers a real request by then, seconds"
    )
    stop_deadline_s: float = Field(
        default=10.0, gt=0, description="a service that has not ended by then is killed, seconds"
    )
    min_free_mib: int = Field(
        default=1024, ge=0, description="the stack does not start with less free disk than this, MiB"
    )
    cache: Path = Field(
        default_factory=default_cache, description="folder of downloaded jars, shared by all stacks"
    )
