"""The second half of `rollwire bench routing`: how far trainer and fleet are apart, with and without their routes.

The demo policy, from its warm start; a few real steps on the demo's environment with a trainer on fp32 masters;
then the fleet samples on the bf16-rounded weights of a version, and the trainer computes the same tokens on the masters of
the newest one. Lag 0 is rounding alone. Percentiles of |log pi - log mu| over sampled tokens, nats; the setting `filter` has a
free router and counts, so that its mismatch is that of `off`.

    routing.mismatch.lag<n>.<setting>.<p50|p99|p999>   settings off, filter, replay, both; baseline: off
    routing.p999_ratio                                 p99.9 with replay and filter over without, lag 0
    routing.p999_ratio.lag<n>                          the same at lag 1 and 4
    routing.routes_differing                           tokens one of whose layers' sets of experts differs, lag 0
    routing.routes_differing.lag<n>                    the same at lag 1 and 4
    routing.routes_differing.token_layers              (token, layer) pairs, lag 0
    routing.implausible.lag<n>                         recorded experts that the filter replaced, of all
    routing.mismatch.damaged.<setting>.<p50|p99|p999>  lag 0, with one of 200 recorded experts replaced by any other
    routing.damaged_replaced                           of the experts so planted, those that the filter replaced
    routing.kv.*                                       see `routing_kv`: four versions are swapped over at once
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.trainer.gradient import Work, add_gradients
from rollwire.consumers.trainer.plan import Arrays
from rollwire.consumers.trainer.weights import TrainedWeights
from rollwire.kernels.advantages import group_advantages
from rollwire.kernels.loss import LossConfig, loss_batch, policy_gradient
from rollwire.kernels.policy.model import Policy
from rollwire.kernels.tensors import State
from rollwire.ops.bench.routing import demo_sizes
from rollwire.ops.bench.routing_kv import kv_figures
from rollwire.ops.figures import Figure
from rollwire.ops.settings import RunSettings
from rollwire.ops.warm import load_warm_start, make_warm_start
from rollwire.producers.engine_torch import TorchEngine
from rollwire.producers.environments.countdown import Countdown
from rollwire.producers.fleet import derive_seed
from rollwire.streams.seams.engine import Sampled, SampleRequest

LAGS: Final = (0, 1, 4)
STEPS: Final = 8
GROUPS, GROUP_SIZE = 32, 8
DAMAGED: Final = 0.005  # of recorded experts
BATCH: Final = 128  # sequences of one forward pass
SETTINGS: Final[dict[str, LossConfig]] = {
    "off": LossConfig(replay_routes=False),
    "filter": LossConfig(replay_routes=False, filter_routes=True),
    "replay": LossConfig(),
    "both": LossConfig(filter_routes=True),
}


class Sequence(NamedTuple):
    """One rollout of P prompt and N sampled tokens, T together."""

    tokens_T: NDArray[np.int64]
    prompt: int
    logp_N: NDArray[np.float32]
    routes_TLK: NDArray[np.int16]  # -1 for the last token, which was never an input
    reward: float


class Measured(NamedTuple):
    apart_S: NDArray[np.float64]
    implausible: int

    def at(self, share: float) -> float:
        """A percentile of |log pi - log mu|, one that was observed."""
        return float(np.quantile(self.apart_S, share, method="inverted_cdf"))


class Differing(NamedTuple):
    tokens: float
    token_layers: float


def sample(settings: RunSettings, version: int, state: State, tasks: int, copies: int) -> list[Sequence]:
    """`copies` rollouts of each of `tasks` tasks, sampled on one version; those of a task stand together."""
    environment = Countdown()
    engine = TorchEngine(settings.policy, 512)
    engine.swap(version, state)
    drawn = [environment.reset(derive_seed("bench", settings.seed, version, n)) for n in range(tasks)]
    engine.submit(
        [
            SampleRequest(
                f"{n}.{copy}",
                task.prompt_ids,
                environment.max_new_tokens,
                derive_seed("sample", settings.seed, version, n, copy),
            )
            for n, task in enumerate(drawn)
            for copy in range(copies)
        ]
    )
    done: dict[str, Sampled] = {}
    while engine.running:
        done |= {one.request_id: one for one in engine.step()}
    made: list[Sequence] = []
    for n, task in enumerate(drawn):
        for copy in range(copies):
            one = done[f"{n}.{copy}"]
            if one.routes is None:
                raise ValueError("the engine recorded no routes")
            routes = np.full((len(one.routes) + 1, *one.routes.shape[1:]), -1, np.int16)
            routes[:-1] = one.routes
            verdict = environment.score(task.task, one.token_ids, one.finish_reason)
            made.append(
                Sequence(
                    np.concatenate([task.prompt_ids, one.token_ids]),
                    len(task.prompt_ids),
                    one.logprobs,
                    routes,
                    verdict.reward or 0.0,
                )
            )
    return made


def train(settings: RunSettings, weights: TrainedWeights, config: TrainerConfig, version: int) -> None:
    """One step on rollouts of the newest version."""
    sequences = sample(settings, version, weights.published(), GROUPS, GROUP_SIZE)
    advantages: list[float] = []
    for at in range(0, len(sequences), GROUP_SIZE):
        group = group_advantages([one.reward for one in sequences[at : at + GROUP_SIZE]])
        advantages += [value or 0.0 for value in group.advantages]
    works = [
        _work(sequences[at : at + BATCH], advantages[at : at + BATCH], version)
        for at in range(0, len(sequences), BATCH)
    ]
    add_gradients(weights.policy, works, config, total_sequences=len(sequences), measure_free=False)
    weights.update(version + 1)


def _work(sequences: list[Sequence], advantages: list[float], version: int) -> Work:
    sampled = sum(len(one.logp_N) for one in sequences)
    return Work(
        Arrays(
            cu_seqlens=np.cumsum([0, *(len(one.tokens_T) for one in sequences)]).astype(np.int32),
            tokens_T=np.concatenate([one.tokens_T for one in sequences]),
            mask_T=np.concatenate([np.arange(len(one.tokens_T)) >= one.prompt for one in sequences]),
            logp_S=np.concatenate([one.logp_N for one in sequences]),
            versions_S=np.full(sampled, version, np.int64),
            advantages_B=np.array(advantages, np.float32),
            sources_B=(("countdown", "bench"),) * len(sequences),
        ),
        np.concatenate([one.routes_TLK for one in sequences]),
    )


def measure(policy: Policy, sequences: list[Sequence]) -> tuple[dict[str, Measured], Differing]:
    """The four settings on the same tokens, and how often the free router differs from the recorded one."""
    apart: dict[str, list[NDArray[np.float64]]] = defaultdict(list)
    implausible: dict[str, int] = defaultdict(int)
    differing = np.zeros(4, np.int64)  # tokens that differ, tokens, pairs that differ, pairs
    for at in range(0, len(sequences), BATCH):
        work = _work(sequences[at : at + BATCH], [0.0] * len(sequences[at : at + BATCH]), 0)
        arrays = work.arrays
        recorded: NDArray[Any] = np.asarray(work.routes_TLK)
        batch = loss_batch(
            arrays.tokens_T,
            arrays.cu_seqlens,
            arrays.mask_T,
            arrays.logp_S,
            arrays.advantages_B,
            total_sequences=len(arrays.advantages_B),
            routes_TLK=recorded,
        )
        for name, config in SETTINGS.items():
            result = policy_gradient(policy, batch, config)
            apart[name].append(np.abs(result.logp_S.numpy().astype(np.float64) - arrays.logp_S))
            if result.implausible_L is not None:
                implausible[name] += int(result.implausible_L.sum())
            if name == "off":
                known_T = recorded[:, 0, 0] >= 0
                own = np.sort(result.router_TLK.numpy(), axis=2)
                differs_TL = (own != np.sort(recorded, axis=2)).any(axis=2)[known_T]
                differing += [differs_TL.any(1).sum(), len(differs_TL), differs_TL.sum(), differs_TL.size]
    measured = {name: Measured(np.concatenate(parts), implausible[name]) for name, parts in apart.items()}
    return measured, Differing(float(differing[0] / differing[1]), float(differing[2] / differing[3]))


def damaged(sequences: list[Sequence], experts: int, *, seed: int) -> tuple[list[Sequence], int]:
    """`DAMAGED` of the recorded experts replaced by another of the layer's that the row does not hold; how many."""
    rng = np.random.default_rng(seed)
    planted, made = 0, []
    for one in sequences:
        routes = one.routes_TLK.copy()
        for token, layer, place in np.argwhere((routes >= 0) & (rng.random(routes.shape) < DAMAGED)):
            others = np.setdiff1d(np.arange(experts), routes[token, layer])
            if len(others):
                routes[token, layer, place] = rng.choice(others)
                planted += 1
        made.append(one._replace(routes_TLK=routes))
    return made, planted


def _percentiles(label: str, measured: dict[str, Measured]) -> list[Figure]:
    return [
        Figure(
            name=f"routing.mismatch.{label}.{name}.{word}",
            value=one.at(share),
            unit="nats",
            baseline=measured["off"].at(share),
        )
        for name, one in measured.items()
        for word, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999))
    ]


def bench_mismatch(*, rollouts: int = 4096, seed: int = 0) -> list[Figure]:
    """`rollouts` at each lag, about ten sampled tokens each. Makes the warm start where the cache does not have it."""
    settings = RunSettings.model_validate({"seed": seed})
    make_warm_start(settings)
    return mismatch_figures(settings, load_warm_start(settings), rollouts)


def mismatch_figures(settings: RunSettings, initial: State, rollouts: int) -> list[Figure]:
    """`STEPS` steps from `initial`, then the measurements at every lag."""
    policy = settings.policy
    config = TrainerConfig(forward="masters", warmup_steps=0)
    weights = TrainedWeights(policy, config)
    weights.load(initial)
    published = [weights.published()]
    for version in range(STEPS):
        train(settings, weights, config, version)
        published.append(weights.published())
    figures: list[Figure] = []
    for lag in LAGS:
        version = STEPS - lag
        sequences = sample(settings, version, published[version], rollouts, 1)
        measured, differing = measure(weights.policy, sequences)
        suffix = "" if lag == 0 else f".lag{lag}"
        recorded = sum(int((one.routes_TLK >= 0).sum()) for one in sequences)
        figures += [
            Figure(name=f"routing.routes_differing{suffix}", value=differing.tokens, unit="of tokens"),
            *_percentiles(f"lag{lag}", measured),
            Figure(
                name=f"routing.p999_ratio{suffix}",
                value=measured["both"].at(0.999) / measured["off"].at(0.999),
                unit="of p99.9 of off",
            ),
            Figure(
                name=f"routing.implausible.lag{lag}",
                value=measured["both"].implausible / recorded,
                unit="of recorded experts",
            ),
        ]
        if lag == 0:
            hurt, planted = damaged(sequences, policy.num_experts, seed=settings.seed)
            measured, _ = measure(weights.policy, hurt)
            figures += [
                Figure(
                    name="routing.routes_differing.token_layers",
                    value=differing.token_layers,
                    unit="of pairs",
                ),
                *demo_sizes([one.routes_TLK[:-1] for one in sequences], policy.num_experts),
                *_percentiles("damaged", measured),
                Figure(
                    name="routing.damaged_replaced",
                    value=measured["both"].implausible / max(planted, 1),
                    unit="of planted experts",
                ),
            ]
    return figures + kv_figures(policy, published[STEPS - 4], published[STEPS], seed=settings.seed)
