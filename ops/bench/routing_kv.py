"""The third part of `rollwire bench routing`: what becomes of the KV cache at a swap, kept or computed anew.

Rollouts of the demo policy are half-way when newer weights are swapped in. The mismatch is that of the tokens sampled after
it against a scoring pass of the newer weights alone: what a trainer at that version would see at lag 0. Percentiles of
|log pi - log mu|, nats. The pause is the first decode step after the swap, beside the median of the steps before it.

    routing.kv.<keep|recompute>.<p50|p99|p999>   baseline: keep
    routing.kv.<keep|recompute>.pause_ms         baseline: an ordinary step
"""

from __future__ import annotations

import statistics
import time
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.loss import LossConfig, loss_batch, policy_gradient
from rollwire.kernels.policy.config import PolicyConfig
from rollwire.kernels.policy.model import Policy
from rollwire.kernels.policy.states import load_state
from rollwire.kernels.tensors import State
from rollwire.ops.figures import Figure
from rollwire.producers.engine_torch import TorchEngine
from rollwire.producers.environments.countdown import Countdown
from rollwire.producers.fleet import derive_seed
from rollwire.streams.seams.engine import Sampled, SampleRequest

KV = Literal["keep", "recompute"]
ROWS: Final = 512
STEPS_BEFORE: Final = 4
BATCH: Final = 128  # sequences of one scoring pass


def kv_figures(config: PolicyConfig, old: State, new: State, *, seed: int) -> list[Figure]:
    """`old` is swapped for `new` after `STEPS_BEFORE` decode steps of `ROWS` requests; both ways on the same draws."""
    figures: list[Figure] = []
    kept: dict[str, float] = {}
    ways: tuple[KV, ...] = ("keep", "recompute")
    for kv in ways:
        done, prompts, pause_s, step_s = _swapped(config, old, new, kv, seed)
        apart = _apart(config, new, done, prompts)
        for word, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999)):
            value = float(np.quantile(apart, share))
            kept.setdefault(word, value)
            figures.append(
                Figure(name=f"routing.kv.{kv}.{word}", value=value, unit="nats", baseline=kept[word])
            )
        figures.append(
            Figure(name=f"routing.kv.{kv}.pause_ms", value=1e3 * pause_s, unit="ms", baseline=1e3 * step_s)
        )
    return figures


def _swapped(
    config: PolicyConfig, old: State, new: State, kv: KV, seed: int
) -> tuple[list[Sampled], dict[str, NDArray[np.int64]], float, float]:
    environment = Countdown()
    engine = TorchEngine(config, ROWS, kv_at_swap=kv)
    engine.swap(0, old)
    tasks = [environment.reset(derive_seed("kv", seed, n)) for n in range(ROWS)]
    engine.submit(
        [
            SampleRequest(str(n), task.prompt_ids, environment.max_new_tokens, derive_seed("kv", seed, n, 0))
            for n, task in enumerate(tasks)
        ]
    )
    done: list[Sampled] = []
    steps_s: list[float] = []
    for _ in range(STEPS_BEFORE):
        began = time.perf_counter()
        done += engine.step()
        steps_s.append(time.perf_counter() - began)
    began = time.perf_counter()
    engine.swap(1, new)
    done += engine.step()
    pause_s = time.perf_counter() - began
    while engine.running:
        done += engine.step()
    return (
        done,
        {str(n): task.prompt_ids for n, task in enumerate(tasks)},
        pause_s,
        statistics.median(steps_s[1:]),
    )


def _apart(
    config: PolicyConfig, state: State, done: list[Sampled], prompts: dict[str, NDArray[np.int64]]
) -> NDArray[np.float64]:
    """|log pi - log mu| of every token sampled after the swap, pi by a scoring pass of `state`."""
    policy = Policy(config)
    load_state(policy, state)
    found: list[NDArray[np.float64]] = []
    for at in range(0, len(done), BATCH):
        part = done[at : at + BATCH]
        asked = [prompts[one.request_id] for one in part]
        lengths = [len(prompt) + len(one.token_ids) for prompt, one in zip(asked, part, strict=True)]
        mask = [np.arange(length) >= len(prompt) for prompt, length in zip(asked, lengths, strict=True)]
        logp_S = np.concatenate([one.logprobs for one in part])
        batch = loss_batch(
            np.concatenate(
                [ids for prompt, one in zip(asked, part, strict=True) for ids in (prompt, one.token_ids)]
            ),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            np.concatenate(mask),
            logp_S,
            np.zeros(len(part), np.float32),
            total_sequences=len(part),
        )
        scored_S = policy_gradient(policy, batch, LossConfig(replay_routes=False)).logp_S.numpy()
        after_S = np.concatenate([one.versions for one in part]) == 1
        found.append(np.abs(scored_S.astype(np.float64) - logp_S)[after_S])
    return np.concatenate(found)
