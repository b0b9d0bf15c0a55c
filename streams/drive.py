"""What the runtime drives, and how: the settings of batches, waits and breakers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from rollwire.streams.emit import take
from rollwire.streams.seams.log import Record
from rollwire.streams.step import Step, Taken


class RuntimeConfig(BaseModel):
    """How the runtime batches and how long it waits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    linger_ms: float = Field(
        default=50.0, ge=0, description="How long a batch is gathered after its first record."
    )
    max_records: int = Field(default=2_000, ge=1, description="Records of one batch at most.")
    max_bytes: int = Field(
        default=32 * 1024 * 1024,
        ge=1,
        description="Bytes of one batch; it ends with the poll that reaches them.",
    )
    idle_s: float = Field(default=0.2, ge=0, le=1, description="How long one wait for a first record may be.")
    offsets_only_s: float = Field(
        default=1.0, ge=0, description="Offsets without outputs are committed this often."
    )
    end_check_s: float = Field(
        default=0.2, ge=0, description="The log's ends are asked for no more often than this."
    )
    transaction_s: float = Field(
        default=8.0, gt=0, description="Deadline of a commit, of a take-over and of a restore's stall."
    )
    patience_s: float = Field(
        default=60.0, gt=0, description="How long failures may go on before the last one is raised."
    )
    backoff_s: float = Field(default=0.2, gt=0, description="First wait after a failure; doubles up to 5 s.")
    held_back_s: float = Field(
        default=5.0,
        gt=0,
        description="How often to look for inputs that an open transaction holds back; twice in a row is told.",
    )
    max_refused_run: int = Field(
        default=200, ge=0, description="That many refusals in a row halt the processor; 0 = never."
    )
    max_refused_share: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="More refusals than this share of the last records halt the processor; 0 = never.",
    )
    refused_window: int = Field(default=1_000, ge=2, description="How many records the share is taken of.")
    deaths: int = Field(
        default=2,
        ge=0,
        description="A record that was alone when its worker died, this often, is refused undecoded; 0 = never.",
    )


class Drive(NamedTuple):
    """What to drive: `make` builds an empty step, `take` decodes its records."""

    transactional_id: str
    group: str
    make: Callable[[], Step]
    take: Callable[[Record], Taken] = take
