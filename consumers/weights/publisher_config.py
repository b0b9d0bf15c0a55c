"""Settings of the snapshot publisher. No I/O."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class PublisherConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    anchor_every: int = Field(
        default=25, ge=1, description="A full snapshot beside the delta every so many versions."
    )
    max_uncommitted: int = Field(
        default=2,
        ge=1,
        le=2,
        description="Versions submitted but not committed; beyond that `submit` waits (law 3: two).",
    )
    coder: Literal["gap", "context"] = Field(
        default="gap",
        description="Of the deltas: gap is quick and runs backwards as it is; context is a quarter smaller and slower, for "
        "fleets behind thin lines, and needs a link of its own for the way back.",
    )
    shard_bytes: int = Field(default=64 << 20, ge=1, description="Size of a delta's objects, about; bytes.")
    anchor_shard_bytes: int = Field(
        default=256 << 20,
        ge=1,
        description="Size of an anchor's objects, about, and of what is put again when a connection breaks; bytes.",
    )
    threads: int = Field(default=1, ge=1, description="Threads that compare and compress.")
    puts: int = Field(default=4, ge=1, description="Shards of one delta that are put at once.")
    submit_timeout_s: float = Field(
        default=120.0, gt=0, description="How long `publish` and `submit` wait for earlier versions."
    )
    store_patience_s: float = Field(
        default=60.0,
        ge=0,
        description="How long a version is tried again while the object store is away; then it fails, and the trainer restarts.",
    )
    links: bool = Field(
        default=True,
        description="Build skip links, and ways back where deltas have none, in the background.",
    )
