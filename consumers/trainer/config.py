"""Settings of the trainer. No I/O, no torch."""

from __future__ import annotations

import os
from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from rollwire.kernels.corrections import CorrectionConfig


class TrainerConfig(CorrectionConfig):
    """The recipe of one lineage and the limits of its process. The defaults are the demo's recipe.

    The corrections are part of the arithmetic.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    # The arithmetic. Every one of these enters the bits, and is written into `train-steps` as `settings`.
    learning_rate: float = Field(default=2e-4, gt=0, description="AdamW's rate after the warm-up.")
    warmup_steps: int = Field(
        default=5, ge=0, description="Steps over which the rate rises linearly to its full value."
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's decay of the first moment.")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="AdamW's decay of the second moment.")
    epsilon: float = Field(
        default=1e-8, gt=0, description="AdamW's floor under the root of the second moment."
    )
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's decoupled weight decay.")
    clip_norm: float = Field(default=10.0, gt=0, description="Bound on the global L2 norm of the gradient.")
    seed: int = Field(
        default=0, ge=0, description="Seed of the trainer's own randomness (the control's shuffle)."
    )
    forward: Literal["published", "masters"] = Field(
        default="published",
        description="Weights of the forward pass: the bf16 values that samplers get, with the gradient passed "
        "straight through to the fp32 masters, or the masters themselves.",
    )
    routing_replay: bool = Field(default=True, description="Recorded expert ids override the router.")
    routing_filter: bool = Field(
        default=False,
        description="Recorded experts that the router finds implausible are replaced by its own candidates, and counted "
        "by layer; without replay they are only counted.",
    )
    routing_plausible: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="A recorded expert is plausible from this share of the router's k-th largest probability on.",
    )
    use_ratio: bool = Field(
        default=True, description="Weigh each token by the truncated ratio min(pi / mu, ratio_bound)."
    )
    ratio_bound: float = Field(default=2.0, gt=0, description="Bound of the token ratio.")
    kl_coefficient: float = Field(
        default=0.0, ge=0, description="Weight of the k1 estimate of KL to the rollout policy."
    )
    control: bool = Field(
        default=False,
        description="Shuffle the advantages within each step: a control that must not learn anything.",
    )
    threads: int = Field(default=1, ge=1, description="Threads of torch in each rank; the bits depend on it.")
    ranks: int = Field(
        default=1, ge=1, description="Data-parallel ranks; rank r reads partition r of `packed-batches`."
    )

    # What is measured beside it.
    no_replay_every: int = Field(
        default=10, ge=0, description="Measure the mismatch with a free router at every Nth step; 0 = never."
    )

    # What is watched: |log pi - log mu| over the trained tokens of each environment and fleet.
    mismatch_bound: float | None = Field(
        default=None, gt=0, description="Bound of its 99th percentile, nats; none = nothing is watched."
    )
    mismatch_steps: int = Field(
        default=5, ge=1, description="Steps in a row beyond the bound that raise an alarm (a notice)."
    )
    mismatch_min_tokens: int = Field(
        default=100,
        ge=1,
        description="Tokens that a percentile needs to be judged: with fewer, a step neither adds to the row nor ends it.",
    )
    mismatch_action: Literal["warn", "pause"] = Field(
        default="warn",
        description="At an alarm: go on, or end after the step that raised it is committed. A paused trainer starts again "
        "when the alarm is accepted, or under another bound or action.",
    )
    mismatch_accepted_step: int = Field(
        default=0, ge=0, description="Alarms up to this step are accepted: they pause no trainer that starts."
    )

    # Durability.
    checkpoint_every: int = Field(default=25, ge=1, description="Checkpoint at every Kth step.")
    max_uncommitted: int = Field(
        default=2,
        ge=1,
        le=2,
        description="Steps taken but not committed, the running one included, before the trainer waits.",
    )
    max_restarts: int = Field(
        default=3,
        ge=0,
        description="Restarts from the checkpoint within this process after a version that could not be published.",
    )

    # Deadlines (law 8).
    publish_deadline_s: float = Field(
        default=120.0, gt=0, description="From submitting a version to its objects standing."
    )
    commit_deadline_s: float = Field(
        default=60.0, gt=0, description="For one transaction, its repeats after doubt included."
    )
    read_deadline_s: float = Field(
        default=30.0, gt=0, description="For reading what is known to be in the log."
    )
    rank_deadline_s: float = Field(
        default=120.0, gt=0, description="For any answer of another rank, and for a collective."
    )
    shutdown_s: float = Field(
        default=8.0, gt=0, description="For finishing the running step and committing what is published."
    )

    @model_validator(mode="after")
    def _pause_watches_something(self) -> Self:
        if self.mismatch_action == "pause" and self.mismatch_bound is None:
            raise ValueError(
                "mismatch_action is pause without a mismatch_bound: set the bound that it is to pause at"
            )
        return self

    def rate(self, step: int) -> float:
        """Learning rate of optimiser step `step` = 1, 2, ...: linear warm-up, then constant."""
        if self.warmup_steps == 0:
            return self.learning_rate
        return self.learning_rate * min(1.0, step / self.warmup_steps)

    def measures_without_replay(self, step: int) -> bool:
        return self.routing_replay and self.no_replay_every > 0 and step % self.no_replay_every == 0

    def settings(self, *, torch_version: str, policy: str, cpu: str, code: str) -> dict[str, str]:
        """What the bits of a step depend on beyond its plan, as written into `train-steps`. `cpu`: the instruction set that
        the kernels are chosen by. `code`: of the trainer."""
        named = self.model_dump(
            include={
                "learning_rate",
                "warmup_steps",
                "beta1",
                "beta2",
                "epsilon",
                "weight_decay",
                "clip_norm",
                "seed",
                "forward",
                "routing_replay",
                "routing_filter",
                "routing_plausible",
                "use_ratio",
                "ratio_bound",
                "kl_coefficient",
                *CorrectionConfig.model_fields,
                "control",
                "threads",
                "ranks",
            }
        )
        values = {
            name: repr(value) if isinstance(value, float) else str(value) for name, value in named.items()
        }
        values["torch"] = torch_version
        values["cpu"] = cpu
        values["code"] = code
        values["policy"] = policy
        values["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "unset")
        return values
