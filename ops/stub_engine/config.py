"""The settings of a stub engine: which server it stands in for, what it loads first, and the flags of that server."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Kind = Literal["vllm", "sglang"]


class StubEngineConfig(BaseModel):
    """One stub server."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind = Field(description="whose HTTP calls it answers")
    model_path: Path = Field(description="folder of safetensors with config.json: loaded at the start")
    weight_version: str = Field(
        default="default", min_length=1, description="label of the weights that are loaded at the start"
    )
    max_running: int = Field(default=64, ge=1, description="requests decoded at once; more wait their turn")
    return_routed_experts: bool = Field(
        default=True, description="as the flag --enable-return-routed-experts of both servers"
    )
    dev_mode: bool = Field(
        default=True,
        description="vLLM: as VLLM_SERVER_DEV_MODE=1, without which the calls on weights are not there",
    )
    original_logprobs: bool = Field(
        default=False,
        description="SGLang: as SGLANG_RETURN_ORIGINAL_LOGPROB=1: logprobs at temperature 1, not at the request's",
    )
    api_key: str | None = Field(default=None, description="as --api-key of both servers")
    step_delay_s: float = Field(
        default=0.0,
        ge=0,
        le=1.0,
        description="seconds added to each decode step, as a larger model would take",
    )
