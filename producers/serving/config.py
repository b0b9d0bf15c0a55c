"""Settings of a serving replica."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ServingConfig(BaseModel):
    """One replica that answers people. Its engine is that of the run's fleet settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(default="127.0.0.1", description="address to listen on; whoever reaches it may ask")
    port: int = Field(default=8400, ge=0, le=65_535, description="port to listen on; 0 = a free one")
    fleet: str = Field(
        default="serving", description="name of the fleet: all replicas that answer with one model"
    )
    replica: str = Field(default="serving-0", description="name of this replica; unique in the fleet")
    environment: str = Field(
        default="production", description="what rollouts of live traffic name as environment"
    )
    tenant: str = Field(
        default="default",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,63}$",
        description="whose traffic it is; feedback must come with a key of it",
    )
    max_new_tokens: int = Field(default=16, ge=1, description="tokens of an answer, at most")
    max_prompt_tokens: int = Field(default=1_024, ge=1, description="tokens of a question: 400 above")
    max_body_bytes: int = Field(default=64 * 1024, ge=1, description="of a request: 413 above")
    temperature: float = Field(
        default=1.0, gt=0, description="sampling temperature; logprobs are at temperature 1"
    )
    seed: int = Field(default=0, ge=0, description="of the samples")
    max_open: int = Field(
        default=1_024,
        ge=1,
        description="questions that wait, are answered or are not in the log yet: 503 above",
    )
    answer_s: float = Field(default=30.0, gt=0, description="from a question to its answer: 503 after")
    record_s: float = Field(
        default=2.0,
        ge=0,
        description="how long an answer waits to be in the log; after it, it is given as `recorded: false` and written later",
    )
    start_s: float = Field(default=300.0, gt=0, description="seconds to wait for the first version")
    swap_retry_s: float = Field(
        default=5.0, gt=0, description="pause after a version that the engine did not take"
    )
    patience_s: float = Field(
        default=300.0, gt=0, description="seconds without the broker or the keys before giving up"
    )
    drain_s: float = Field(default=8.0, gt=0, description="seconds to finish what is open at a stop")
