"""One behavioural suite for every engine: the in-memory twin and the built-in one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rollwire.kernels.tensors import State
from rollwire.schemas.errors import RollwireError
from rollwire.streams.seams.engine import Engine, Sampled, SampleRequest
from rollwire.streams.seams.engine_memory import EXPERTS, LAYERS, TOP_K, MemoryEngine

VOCAB = 20
END = 1

MakeEngine = Callable[[int], Engine]


class Subject:
    """An engine to try, and two states that it can serve."""

    def __init__(self, make: MakeEngine, states: tuple[State, State]) -> None:
        self.make = make
        self.states = states

    def serving(self, version: int = 0, *, max_running: int = 64) -> Engine:
        engine = self.make(max_running)
        engine.swap(version, self.states[0])
        return engine


@pytest.fixture(scope="module", params=["memory", pytest.param("torch", marks=pytest.mark.torch)])
def subject(request: pytest.FixtureRequest) -> Subject:
    if request.param == "memory":
        return Subject(lambda n: MemoryEngine(vocab_size=VOCAB, end_id=END, max_running=n), ({}, {}))
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    from rollwire.kernels.policy.config import PolicyConfig
    from rollwire.kernels.policy.model import Policy
    from rollwire.kernels.policy.states import to_state
    from rollwire.producers.engine_torch import TorchEngine

    config = PolicyConfig()
    states = (to_state(Policy(config, seed=1)), to_state(Policy(config, seed=2)))
    return Subject(lambda n: TorchEngine(config, n), states)


def requests(count: int, *, max_new_tokens: int = 12, record_routes: bool = True) -> list[SampleRequest]:
    rng = np.random.default_rng(5)
    return [
        SampleRequest(
            request_id=f"r{index}",
            prompt_ids=rng.integers(2, VOCAB, size=3 + index % 5),
            max_new_tokens=max_new_tokens,
            seed=1_000 + index,
            record_routes=record_routes,
        )
        for index in range(count)
    ]


def drain(engine: Engine, steps: int = 1_000) -> dict[str, Sampled]:
    finished: dict[str, Sampled] = {}
    for _ in range(steps):
        if not engine.running:
            return finished
        for sampled in engine.step():
            assert sampled.request_id not in finished
            finished[sampled.request_id] = sampled
    raise AssertionError(f"{engine.running} requests still run after {steps} steps")


def test_nothing_running_returns_at_once(subject: Subject) -> None:
    engine = subject.make(4)
    assert engine.version == -1
    assert engine.running == 0
    assert engine.step() == []
    assert engine.abort() == []


def test_every_request_comes_back_once_and_whole(subject: Subject) -> None:
    asked = requests(40)
    engine = subject.serving(3)
    engine.submit(asked)
    assert engine.running == 40
    finished = drain(engine)
    assert set(finished) == {request.request_id for request in asked}
    for request in asked:
        sampled = finished[request.request_id]
        count = sampled.token_ids.size
        assert 1 <= count <= request.max_new_tokens
        assert sampled.token_ids.dtype == np.int64
        assert sampled.logprobs.dtype == np.float32
        assert sampled.logprobs.shape == sampled.versions.shape == (count,)
        assert np.isfinite(sampled.logprobs).all()
        assert (sampled.logprobs <= 0).all()
        assert (sampled.versions == 3).all()
        assert not (sampled.token_ids[:-1] == END).any()
        if sampled.finish_reason == "stop":
            assert sampled.token_ids[-1] == END
        else:
            assert sampled.finish_reason == "length"
            assert count == request.max_new_tokens
    assert len({sampled.token_ids.size for sampled in finished.values()}) > 1


def test_routes_have_no_row_for_a_token_that_was_never_fed_back(subject: Subject) -> None:
    asked = requests(8)
    engine = subject.serving()
    engine.submit(asked)
    for request_id, sampled in drain(engine).items():
        prompt = next(r.prompt_ids.size for r in asked if r.request_id == request_id)
        routes_RLK = sampled.routes
        assert routes_RLK is not None
        assert routes_RLK.dtype == np.uint8
        assert routes_RLK.shape == (prompt + sampled.token_ids.size - 1, LAYERS, TOP_K)
        assert (routes_RLK < EXPERTS).all()
        assert (routes_RLK[..., 0] != routes_RLK[..., 1]).all()


def test_routes_only_when_asked_for(subject: Subject) -> None:
    engine = subject.serving()
    engine.submit(requests(2, record_routes=False))
    assert all(sampled.routes is None for sampled in drain(engine).values())


def test_draws_depend_on_the_own_seed_alone(subject: Subject) -> None:
    asked = requests(12)
    crowd, alone = subject.serving(), subject.serving(max_running=2)
    crowd.submit(asked)
    together = drain(crowd)
    for request in asked:
        alone.submit([request])
        single = drain(alone)[request.request_id]
        assert np.array_equal(single.token_ids, together[request.request_id].token_ids)
        assert np.allclose(single.logprobs, together[request.request_id].logprobs, atol=1e-4)
    other = subject.serving()
    other.submit([request._replace(seed=request.seed + 1) for request in asked])
    changed = drain(other)
    assert any(not np.array_equal(changed[k].token_ids, together[k].token_ids) for k in together)


def test_more_requests_than_rows(subject: Subject) -> None:
    engine = subject.serving(max_running=4)
    engine.submit(requests(30))
    assert len(drain(engine)) == 30


def test_a_swap_drops_nothing_and_every_token_tells_its_version(subject: Subject) -> None:
    asked = requests(30)
    engine = subject.serving(1)
    engine.submit(asked)
    early: list[Sampled] = []
    for _ in range(3):
        early += engine.step()
    engine.swap(2, subject.states[1])
    assert engine.version == 2
    assert engine.running == 30 - len(early)
    assert all((sampled.versions == 1).all() for sampled in early)
    late = drain(engine)
    assert late
    for sampled in late.values():
        assert sampled.versions.tolist() == [1] * 3 + [2] * (sampled.token_ids.size - 3)


def test_logprobs_are_at_temperature_one(subject: Subject) -> None:
    """Sampled cold, tokens get likelier than at temperature 1, but none is reported as certain."""
    cold, warm = subject.serving(), subject.serving()
    asked = requests(32)
    warm.submit(asked)
    cold.submit([request._replace(temperature=0.2) for request in asked])
    warm_mean = np.concatenate([s.logprobs for s in drain(warm).values()]).mean()
    cold_mean = np.concatenate([s.logprobs for s in drain(cold).values()]).mean()
    assert warm_mean < cold_mean < -0.05


def test_abort_hands_back_what_there_is(subject: Subject) -> None:
    engine = subject.serving(max_running=4)
    engine.submit(requests(6))
    done = engine.step()
    handed_back = engine.abort()
    assert engine.running == 0
    assert len(done) + len(handed_back) == 6
    assert {sampled.finish_reason for sampled in handed_back} == {"abort"}
    assert {sampled.token_ids.size for sampled in handed_back} <= {0, 1}
    for sampled in handed_back:
        assert sampled.logprobs.size == sampled.versions.size == sampled.token_ids.size
    engine.submit(requests(6))  # the ids are free again
    assert len(drain(engine)) == 6


def test_unfit_requests_are_refused_whole(subject: Subject) -> None:
    engine = subject.serving()
    good = requests(1)[0]
    for bad in (good._replace(prompt_ids=np.empty(0, dtype=np.int64)), good._replace(max_new_tokens=0)):
        with pytest.raises(RollwireError):
            engine.submit([bad])
        assert engine.running == 0


def test_sampling_before_the_first_version_is_an_error(subject: Subject) -> None:
    engine = subject.make(4)
    engine.submit(requests(1))
    with pytest.raises(RollwireError, match="swap"):
        engine.step()


def test_a_stop_token_ends_its_own_request_alone(subject: Subject) -> None:
    asked = requests(40, max_new_tokens=30)
    plain, stopping = subject.serving(), subject.serving()
    plain.submit(asked)
    free = drain(plain)
    stopping.submit([r._replace(stop_ids=(5, 7)) if i % 2 else r for i, r in enumerate(asked)])
    stopped = drain(stopping)
    shorter = 0
    for i, request in enumerate(asked):
        before, after = free[request.request_id].token_ids, stopped[request.request_id].token_ids
        stops = np.flatnonzero(np.isin(before, (5, 7))) if i % 2 else np.empty(0, np.int64)
        end = int(stops[0]) + 1 if stops.size else before.size
        # The same draws, up to and with the first stop token.
        assert np.array_equal(after, before[:end])
        if stops.size:
            assert stopped[request.request_id].finish_reason == "stop"
            shorter += end < before.size
    assert shorter > 3
