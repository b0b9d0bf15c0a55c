"""The gradient of one rank's share of a step: microbatches in, gradients added up, per-token figures out.

Legend: T tokens end to end, S trained tokens, B sequences, L layers, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.trainer.figures import Figures
from rollwire.consumers.trainer.measure import routes_differing
from rollwire.consumers.trainer.plan import Arrays
from rollwire.kernels.corrections import CorrectionConfig
from rollwire.kernels.loss import LossConfig, loss_batch, policy_gradient
from rollwire.kernels.loss_corrections import Kept
from rollwire.kernels.policy.model import Policy


class Work(NamedTuple):
    """One microbatch, ready to compute."""

    arrays: Arrays
    routes_TLK: NDArray[np.int16] | None


def loss_settings(config: TrainerConfig) -> LossConfig:
    return LossConfig(
        use_ratio=config.use_ratio,
        ratio_bound=config.ratio_bound,
        kl_coefficient=config.kl_coefficient,
        replay_routes=config.routing_replay,
        filter_routes=config.routing_filter,
        plausible_ratio=config.routing_plausible,
        **config.model_dump(include=set(CorrectionConfig.model_fields)),
    )


def add_gradients(
    policy: Policy, works: Sequence[Work], config: TrainerConfig, *, total_sequences: int, measure_free: bool
) -> Figures:
    """Adds d loss / d weights to the policy's `.grad`, in the order of `works`; the loss is a sum over sequences
    divided by `total_sequences` of the whole plan, so ranks add up.

    `measure_free` repeats the forward pass without gradient and with a free router, which changes no gradient.
    """
    settings = loss_settings(config)
    free_settings = settings.model_copy(update={"replay_routes": False, "filter_routes": False})
    loss, entropy_sum, truncated, differing, compared = 0.0, 0.0, 0, 0, 0
    left_out = np.zeros(4, np.int64)
    implausible_L = np.zeros(policy.config.num_hidden_layers, np.int64)
    sources: list[tuple[str, str]] = []
    source_of: list[bytes] = []
    pi: list[bytes] = []
    free_pi: list[bytes] = []
    for work in works:
        arrays = work.arrays
        batch = loss_batch(
            arrays.tokens_T,
            arrays.cu_seqlens,
            arrays.mask_T,
            arrays.logp_S,
            arrays.advantages_B,
            total_sequences=total_sequences,
            routes_TLK=work.routes_TLK,
        )
        if measure_free and work.routes_TLK is not None:
            with torch.no_grad():
                free = policy_gradient(policy, batch, free_settings)
            free_pi.append(free.logp_S.numpy().tobytes())
            counts = routes_differing(work.routes_TLK, free.router_TLK.numpy().astype(np.int16))
            differing, compared = differing + counts[0], compared + counts[1]
        result = policy_gradient(policy, batch, settings)
        result.loss.backward()  # type: ignore[no-untyped-call]
        loss += float(result.loss.detach())
        entropy_sum += float(result.entropy_S.sum(dtype=torch.float64))
        truncated += int(result.truncated_S.sum())
        left_out += _left_out(result.kept, batch.sequence_S)
        if result.implausible_L is not None:
            implausible_L += result.implausible_L.numpy()
        source_of.append((batch.sequence_S.numpy() + len(sources)).astype("<i8").tobytes())
        sources.extend(arrays.sources_B)
        pi.append(result.logp_S.numpy().tobytes())
    return Figures(
        loss=loss,
        pi=b"".join(pi),
        mu=b"".join(work.arrays.logp_S.tobytes() for work in works),
        free_pi=b"".join(free_pi) if len(free_pi) == len(works) and measure_free else None,
        versions=b"".join(work.arrays.versions_S.tobytes() for work in works),
        sources=tuple(sources),
        source_of=b"".join(source_of),
        entropy_sum=entropy_sum,
        truncated=truncated,
        routes_differing=differing,
        routes_compared=compared,
        masked_low=int(left_out[0]),
        masked_high=int(left_out[1]),
        rejected_sequences=int(left_out[2]),
        rejected_tokens=int(left_out[3]),
        implausible=tuple(implausible_L.tolist()) if config.routing_filter else (),
    )


def _left_out(kept: Kept, sequence_S: torch.Tensor) -> NDArray[np.int64]:
    """Tokens masked below and above, sequences rejected and their tokens."""
    rejected_S = kept.rejected_B[sequence_S]
    return np.array([int(one.sum()) for one in (kept.low_S, kept.high_S, kept.rejected_B, rejected_S)])


def shuffled(works: Sequence[Work], *, seed: int, step: int, rank: int) -> list[Work]:
    """The control: advantages change places among all sequences of this rank's share; a function of its arguments."""
    advantages = np.concatenate([work.arrays.advantages_B for work in works])
    np.random.default_rng([seed, step, rank]).shuffle(advantages)
    ends = np.cumsum([work.arrays.advantages_B.size for work in works])[:-1]
    return [
        work._replace(arrays=work.arrays._replace(advantages_B=part))
        for work, part in zip(works, np.split(advantages, ends), strict=True)
    ]
