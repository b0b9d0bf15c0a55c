"""What of a microbatch the loss leaves out, where trainer and sampler disagree too much.

    token mask          token s counts iff low <= r_s <= high, with r_s = pi_s / mu_s. With the ratio as its weight this
                        is masked importance sampling, M(r) = r inside the bounds, 0 outside: "IcePop" (Ling team 2025,
                        arXiv:2510.18855; bounds 0.5 and 5 there), "MIS" in verl and slime. It is IcePop to the letter
                        where the ratio's own bound is not below the mask's upper one.
    sequence rejection  sequence b counts iff low <= m_b <= high, with m_b over its S_b trained tokens
                            geometric   exp(mean log r_s)            (SkyRL's geometric mask; its bounds 0.99 and 1.01)
                            k1          mean(-log r_s)               estimates KL(mu || pi) of the sequence
                            k3          mean((r_s - 1) - log r_s)    the same, never negative (Schulman 2020)

What is left out contributes nothing, neither to the loss nor to its gradient, and the divisor stays: the loss is still a
sum divided by the step's number of sequences, so nothing depends on how a step is cut into microbatches (which hold
whole sequences). A sequence without trained tokens has no statistic and is not counted as rejected.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

SequenceStatistic = Literal["off", "geometric", "k1", "k3"]


class CorrectionConfig(BaseModel):
    """Which corrections are on, and their bounds; all are off by default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token_mask: bool = Field(
        default=False, description="Leave out tokens whose ratio pi / mu lies outside the bounds."
    )
    token_mask_low: float = Field(default=0.5, ge=0, description="Smallest ratio that counts.")
    token_mask_high: float = Field(default=5.0, gt=0, description="Largest ratio that counts.")
    sequence_reject: SequenceStatistic = Field(
        default="off", description="Leave out sequences whose statistic lies outside the bounds."
    )
    sequence_low: float = Field(
        default=0.99, description="Smallest statistic that counts: below 1 for geometric, at most 0 else."
    )
    sequence_high: float = Field(
        default=1.01, description="Largest statistic that counts: above 1 for geometric, at least 0 else."
    )

    @model_validator(mode="after")
    def _bounds_hold_equal_policies(self) -> CorrectionConfig:
        """Bounds that leave out even a sampler that agrees with the trainer are a mistake, such as geometric bounds for k1."""
        if self.token_mask and not self.token_mask_low <= 1 <= self.token_mask_high:
            raise ValueError(
                f"token_mask bounds {self.token_mask_low:g} to {self.token_mask_high:g} leave out the ratio 1"
            )
        equal = 1.0 if self.sequence_reject == "geometric" else 0.0
        if self.sequence_reject != "off" and not self.sequence_low <= equal <= self.sequence_high:
            raise ValueError(
                f"sequence bounds {self.sequence_low:g} to {self.sequence_high:g} leave out {equal:g}, the "
                f"{self.sequence_reject} statistic of equal policies"
            )
        return self

    @property
    def corrects(self) -> bool:
        return self.token_mask or self.sequence_reject != "off"
