"""The arithmetic of the corrections that `rollwire.kernels.corrections` defines.

Legend: B sequences, S trained tokens in order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rollwire.kernels.corrections import CorrectionConfig, SequenceStatistic


class Kept(NamedTuple):
    """Of the tokens of rejected sequences neither `low_S` nor `high_S` is set: each left-out token has one reason."""

    kept_S: Tensor  # bool: tokens that count
    low_S: Tensor  # bool: masked, their ratio below the bounds
    high_S: Tensor  # bool: masked, their ratio above the bounds
    rejected_B: Tensor  # bool


def all_kept(log_ratio_S: Tensor, sequences: int) -> Kept:
    none_S = torch.zeros_like(log_ratio_S, dtype=torch.bool)
    return Kept(~none_S, none_S, none_S, torch.zeros(sequences, dtype=torch.bool, device=log_ratio_S.device))


@torch.no_grad()
def keep(log_ratio_S: Tensor, sequence_S: Tensor, sequences: int, settings: CorrectionConfig) -> Kept:
    """What counts of `sequences` sequences; `sequence_S` (i64) is the sequence of each token, `log_ratio_S` (float) is
    log pi - log mu. Bounds are inclusive; a ratio that is no number lies outside of any. Computed in float64."""
    kept = all_kept(log_ratio_S, sequences)
    log_r_S = log_ratio_S.double()
    if settings.sequence_reject != "off":
        statistic_B, trained_B = sequence_statistics(log_r_S, sequence_S, sequences, settings.sequence_reject)
        inside_B = (statistic_B >= settings.sequence_low) & (statistic_B <= settings.sequence_high)
        rejected_B = ~inside_B & (trained_B > 0)
        kept = kept._replace(kept_S=~rejected_B[sequence_S], rejected_B=rejected_B)
    if settings.token_mask:
        ratio_S = log_r_S.exp()
        low_S = ~(ratio_S >= settings.token_mask_low) & kept.kept_S
        high_S = (ratio_S > settings.token_mask_high) & kept.kept_S
        kept = kept._replace(kept_S=kept.kept_S & ~low_S & ~high_S, low_S=low_S, high_S=high_S)
    return kept


def sequence_statistics(
    log_r_S: Tensor, sequence_S: Tensor, sequences: int, statistic: SequenceStatistic
) -> tuple[Tensor, Tensor]:
    """(statistic of each sequence, its number of trained tokens), as float64; without tokens the value of equal policies."""
    trained_B = torch.zeros(sequences, dtype=torch.float64, device=log_r_S.device)
    trained_B.index_add_(0, sequence_S, torch.ones_like(log_r_S))
    terms_S = torch.expm1(log_r_S) - log_r_S if statistic == "k3" else -log_r_S
    mean_B = torch.zeros_like(trained_B).index_add_(0, sequence_S, terms_S) / trained_B.clamp(min=1)
    return (torch.exp(-mean_B) if statistic == "geometric" else mean_B), trained_B
