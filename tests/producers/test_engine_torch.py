"""The built-in engine: against a scoring pass, among neighbours, across swaps."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from rollwire.kernels.policy.config import PolicyConfig
from rollwire.kernels.policy.draws import draw, uniforms
from rollwire.kernels.policy.model import Policy
from rollwire.kernels.policy.states import load_state, to_state
from rollwire.kernels.tensors import State
from rollwire.producers.engine_torch import TorchEngine
from rollwire.schemas.errors import ConfigError, StateMismatch, WeightError
from rollwire.streams.seams.engine import Engine, Sampled, SampleRequest

pytestmark = pytest.mark.torch

CONFIG = PolicyConfig()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def state_of(seed: int) -> State:
    """Logits wide enough that tokens differ in likelihood, the end token among the likelier ones."""
    policy = Policy(CONFIG, seed=seed)
    with torch.no_grad():
        policy.lm_head.weight.mul_(3.0)
    return to_state(policy)


def request(index: int, *, seed: int | None = None, new: int = 16, temperature: float = 1.0) -> SampleRequest:
    rng = np.random.default_rng(index)
    prompt = rng.integers(2, CONFIG.vocab_size, int(rng.integers(1, 30)))
    return SampleRequest(f"r{index}", prompt, new, index + 100 if seed is None else seed, temperature)


def drain(engine: Engine) -> dict[str, Sampled]:
    done: dict[str, Sampled] = {}
    for _ in range(10_000):
        if not engine.running:
            break
        done.update({s.request_id: s for s in engine.step()})
    assert not engine.running
    return done


def engine_with(version: int, state: State, max_running: int = 64) -> TorchEngine:
    engine = TorchEngine(CONFIG, max_running)
    engine.swap(version, state)
    return engine


def test_samples_equal_a_scoring_pass() -> None:
    """logprobs to 1e-5, routes exactly; the end token's logprob is there, the last token has no row (C17)."""
    state = state_of(1)
    engine = engine_with(7, state)
    requests = [request(i) for i in range(100)]
    engine.submit(requests)
    done = drain(engine)
    policy = Policy(CONFIG)
    load_state(policy, state)
    reasons = set()
    for asked in requests:
        got = done[asked.request_id]
        ids = np.concatenate([asked.prompt_ids, got.token_ids])
        with torch.no_grad():
            output = policy.forward_packed(torch.from_numpy(ids), np.array([0, len(ids)], np.int32))
        logp = output.logits_TV.log_softmax(-1).numpy()
        sampled = np.arange(len(asked.prompt_ids), len(ids))
        np.testing.assert_allclose(got.logprobs, logp[sampled - 1, got.token_ids], atol=1e-5)
        assert got.routes is not None
        assert got.routes.dtype == np.uint8
        assert np.array_equal(got.routes, output.router_TLK[:-1].numpy())
        assert got.versions.tolist() == [7] * len(got.token_ids)
        ends = got.token_ids == CONFIG.eos_token_id
        assert not ends[:-1].any()
        assert (got.finish_reason == "stop") == bool(ends[-1])
        assert got.finish_reason == "stop" or len(got.token_ids) == 16
        reasons.add(got.finish_reason)
    assert reasons == {"stop", "length"}


def test_neighbours_change_no_token() -> None:
    """Alone, in a crowd, through a narrow engine with a queue, and joining at odd moments."""
    state = state_of(2)
    requests = [request(i) for i in range(60)]
    alone: dict[str, Sampled] = {}
    for asked in requests[:20]:
        engine = engine_with(0, state, 1)
        engine.submit([asked])
        alone.update(drain(engine))

    crowd = engine_with(0, state)
    crowd.submit(requests)
    narrow = engine_with(0, state, 7)
    narrow.submit(requests[::-1])
    straggling = engine_with(0, state)
    late: dict[str, Sampled] = {}
    for asked in requests:
        straggling.submit([asked])
        late.update({s.request_id: s for s in straggling.step()})
    late.update(drain(straggling))
    for other in (drain(crowd), drain(narrow), late):
        assert len(other) == 60
        for name, expected in alone.items():
            assert np.array_equal(other[name].token_ids, expected.token_ids), name
            np.testing.assert_allclose(other[name].logprobs, expected.logprobs, atol=1e-5)
            assert expected.routes is not None
            assert np.array_equal(np.asarray(other[name].routes), expected.routes)


def test_seed_alone_decides() -> None:
    state = state_of(2)
    engine = engine_with(0, state)
    same = request(3, seed=11)
    engine.submit([same._replace(request_id="a"), same._replace(request_id="b")])
    engine.submit([same._replace(request_id=f"c{i}", seed=1000 + i) for i in range(40)])
    done = drain(engine)
    assert np.array_equal(done["a"].token_ids, done["b"].token_ids)
    assert len({tuple(done[f"c{i}"].token_ids.tolist()) for i in range(40)}) > 8


def test_swap_in_flight_keeps_requests_and_their_cache() -> None:
    old, new = state_of(1), state_of(5)
    requests = [request(i, new=12) for i in range(40)]
    engine = engine_with(3, old)
    engine.submit(requests)
    done = {s.request_id: s for _ in range(4) for s in engine.step()}
    engine.swap(4, new)
    assert engine.version == 4
    done.update(drain(engine))

    untouched = engine_with(3, old)
    untouched.submit(requests)
    expected = drain(untouched)
    fresh = engine_with(4, new)
    mixed = 0
    for asked in requests:
        got = done[asked.request_id]
        assert got.versions.tolist() == [3] * min(4, len(got.token_ids)) + [4] * (len(got.token_ids) - 4)
        assert np.array_equal(got.token_ids[:4], expected[asked.request_id].token_ids[:4])
        assert np.array_equal(got.logprobs[:4], expected[asked.request_id].logprobs[:4])
        if len(got.token_ids) > 5:
            # A new prompt of the same text would be read by the new weights: the kept cache shows in the logprob.
            ids = np.concatenate([asked.prompt_ids, got.token_ids[:5]])
            fresh.submit([SampleRequest(asked.request_id, ids, 1, 0)])
            reread = drain(fresh)[asked.request_id]
            assert reread.routes is not None
            assert got.routes is not None
            mixed += not np.array_equal(reread.routes, got.routes[: len(ids)])
    assert mixed > 5


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_a_cache_that_is_recomputed_at_a_swap_is_that_of_the_new_weights_alone(
    kv: Literal["keep", "recompute"],
) -> None:
    old, new = state_of(1), state_of(5)
    engine = TorchEngine(CONFIG, 64, kv_at_swap=kv)
    engine.swap(3, old)
    engine.submit([request(i, new=12) for i in range(40)])
    done = {s.request_id: s for _ in range(4) for s in engine.step()}
    engine.swap(4, new)
    engine.submit([request(i, new=12) for i in range(40, 50)])  # they join the rows that are read again
    done.update(drain(engine))
    before, after = Policy(CONFIG), Policy(CONFIG)
    load_state(before, old)
    load_state(after, new)
    apart: list[float] = []
    for index in range(50):
        got, asked = done[f"r{index}"], request(index, new=12)
        ids = np.concatenate([asked.prompt_ids, got.token_ids])
        with torch.no_grad():
            cut = np.array([0, len(ids)], np.int32)
            first = before.forward_packed(torch.from_numpy(ids), cut)
            output = after.forward_packed(torch.from_numpy(ids), cut)
        logp = output.logits_TV.log_softmax(-1).numpy()
        sampled = np.arange(len(asked.prompt_ids), len(ids))
        mine = got.versions == 4
        apart += np.abs(logp[sampled - 1, got.token_ids] - got.logprobs)[mine].tolist()
        # What was read before the swap keeps the routes that its successor was sampled by.
        assert got.routes is not None
        read_before = len(asked.prompt_ids) + 3 if index < 40 else 0
        assert np.array_equal(
            got.routes[:read_before], first.router_TLK.numpy()[: len(got.routes)][:read_before]
        )
    assert len(apart) > 100
    if kv == "recompute":
        assert max(apart) < 1e-5
    else:
        assert max(apart) > 0.1


def test_a_state_that_does_not_fit_leaves_the_old_one_serving() -> None:
    engine = engine_with(1, state_of(1))
    broken = dict(state_of(2))
    broken.pop("model.norm.weight")
    with pytest.raises(StateMismatch):
        engine.swap(2, broken)
    engine.submit([request(0)])
    assert engine.version == 1
    other = engine_with(1, state_of(1))
    other.submit([request(0)])
    assert np.array_equal(drain(engine)["r0"].token_ids, drain(other)["r0"].token_ids)


def test_abort_hands_back_what_there_is() -> None:
    engine = engine_with(0, state_of(1), 5)
    engine.submit([request(i, new=30) for i in range(9)])
    finished = engine.step() + engine.step()
    aborted = engine.abort()
    assert engine.running == 0
    assert len(finished) + len(aborted) == 9
    started = [s for s in aborted if len(s.token_ids)]
    assert started
    for sampled in aborted:
        assert sampled.finish_reason == "abort"
        asked = request(int(sampled.request_id[1:]))
        assert sampled.routes is not None
        inputs = len(asked.prompt_ids) + len(sampled.token_ids) - 1 if len(sampled.token_ids) else 0
        assert sampled.routes.shape == (inputs, 3, 2)
    assert engine.step() == []


@pytest.mark.parametrize("again", [False, True], ids=["cache kept", "cache read anew"])
def test_some_requests_are_ended_and_the_others_do_not_notice(again: bool) -> None:
    """Rows move into the holes; what they go on to sample is what they would have sampled alone."""
    requests = [request(i, new=20) for i in range(12)]
    untouched = engine_with(0, state_of(1), 5)
    untouched.submit(requests)
    expected = drain(untouched)
    engine = engine_with(0, state_of(1), 5)  # some wait
    engine.submit(requests)
    done = {s.request_id: s for _ in range(2) for s in engine.step()}
    if again:
        engine.recompute_cache()
    asked = [f"r{i}" for i in (0, 3, 7, 11)]
    ended = {s.request_id: s for s in engine.abort([*asked, "nobody"])}
    assert set(ended) == set(asked) - set(done)
    done |= drain(engine)
    for name, sampled in ended.items():
        assert sampled.finish_reason == "abort"
        count = len(sampled.token_ids)
        assert np.array_equal(sampled.token_ids, expected[name].token_ids[:count])
    assert any(len(sampled.token_ids) for sampled in ended.values())
    assert len(done) + len(ended) == 12
    for name, sampled in done.items():
        assert np.array_equal(sampled.token_ids, expected[name].token_ids)
        np.testing.assert_allclose(sampled.logprobs, expected[name].logprobs, atol=1e-5)
        assert np.array_equal(np.asarray(sampled.routes), np.asarray(expected[name].routes))


def test_long_and_short_requests_share_an_engine() -> None:
    engine = engine_with(0, state_of(1), 4)
    long = SampleRequest("long", np.full(300, 5), 40, 1)
    engine.submit([request(1), request(2)])
    first = engine.step()
    engine.submit([long])
    done = {s.request_id: s for s in first} | drain(engine)
    alone = engine_with(0, state_of(1), 1)
    alone.submit([request(1)])
    assert np.array_equal(done["r1"].token_ids, drain(alone)["r1"].token_ids)
    assert done["long"].routes is not None
    assert len(done["long"].routes) == 300 + len(done["long"].token_ids) - 1


def test_bad_requests_are_refused_whole() -> None:
    engine = engine_with(0, state_of(1))
    good = request(0)
    for bad in (
        good._replace(prompt_ids=np.empty(0, np.int64)),
        good._replace(prompt_ids=np.array([3, 20])),
        good._replace(prompt_ids=np.array([-1, 3])),
        good._replace(max_new_tokens=0),
        good._replace(max_new_tokens=5000),
        good._replace(temperature=float("nan")),
    ):
        with pytest.raises(ConfigError):
            engine.submit([good, bad])
        assert engine.running == 0
    empty = TorchEngine(CONFIG, 4)
    assert empty.step() == []
    empty.submit([good])
    with pytest.raises(WeightError):
        empty.step()


def test_temperature_zero_is_the_likeliest_token() -> None:
    engine = engine_with(0, state_of(1))
    asked = request(4, temperature=0.0)
    engine.submit([asked._replace(request_id=str(seed), seed=seed) for seed in range(4)])
    done = drain(engine)
    assert len({tuple(s.token_ids.tolist()) for s in done.values()}) == 1
    assert (np.exp(done["0"].logprobs) >= 1 / CONFIG.vocab_size).all()


def test_draws_follow_the_distribution() -> None:
    """Frequencies within five standard errors; a token of probability 0 never; both ends of the unit interval."""
    probabilities = np.array([0.5, 0.0, 0.2, 0.29, 0.01, 0.0])
    count = 200_000
    with np.errstate(divide="ignore"):
        logp = np.log(probabilities).astype(np.float32)
    seeds = np.arange(count, dtype=np.uint64)
    for temperature in (1.0, 0.5):
        target = probabilities ** (1 / temperature)
        target /= target.sum()
        drawn = draw(
            np.broadcast_to(logp, (count, 6)),
            uniforms(seeds, np.full(count, 3)),
            np.full(count, temperature),
        )
        share = np.bincount(drawn, minlength=6) / count
        assert share[1] == share[5] == 0
        assert (np.abs(share - target) <= 5 * np.sqrt(target * (1 - target) / count) + 1e-12).all()
    edges = draw(np.broadcast_to(logp, (2, 6)), np.array([0.0, 1.0 - 2**-53]), np.ones(2))
    assert edges.tolist() == [0, 4]


def test_uniforms_are_fixed_for_ever_and_independent() -> None:
    values = uniforms(np.array([0, 1, 2**64 - 1], np.uint64), np.array([0, 5, 9]))
    assert values.tolist() == [0.6524484863740322, 0.7743991716672016, 0.8800666774612032]
    grid = uniforms(np.repeat(np.arange(300, dtype=np.uint64), 300), np.tile(np.arange(300), 300)).reshape(
        300, 300
    )
    assert abs(grid.mean() - 0.5) < 0.005
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.02
