"""vLLM and SGLang behind the engine seam, against the stub servers over real HTTP: what the built-in engine gives, they give."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollwire.consumers.weights.engine_feed import EngineFeed
from rollwire.kernels.policy.config import PolicyConfig
from rollwire.kernels.tensors import State
from rollwire.ops.engines import engine_target
from rollwire.ops.stack.ports import choose_port
from rollwire.ops.stub_engine.config import Kind, StubEngineConfig
from rollwire.ops.stub_engine.core import StubCore
from rollwire.ops.stub_engine.serve import StubServer, running_stub
from rollwire.ops.stub_engine.weights import checksums, fresh_policy, write_policy
from rollwire.producers.emit import decode_record
from rollwire.producers.engine_http import EngineConfig, HttpEngine
from rollwire.producers.engine_http_sglang import SglangWire
from rollwire.producers.engine_http_vllm import VllmWire
from rollwire.producers.engine_http_wire import UnknownWeights, Wire, version_array
from rollwire.producers.engine_torch import TorchEngine
from rollwire.producers.environments.countdown import Countdown
from rollwire.producers.fleet import FleetConfig, run_fleet
from rollwire.schemas.errors import ConfigError, EngineRefused, EngineUnavailable, TargetFailed
from rollwire.schemas.records import Rollout, RoutingTrace
from rollwire.streams.seams.engine import Engine, Sampled, SampleRequest
from rollwire.streams.seams.engine_calls import EngineCalls
from rollwire.streams.seams.log import TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.weights_memory import MemoryWeights

pytestmark = pytest.mark.torch

CONFIG = PolicyConfig()
KINDS: tuple[Kind, ...] = ("vllm", "sglang")
STATES = [fresh_policy(CONFIG, seed) for seed in range(3)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Rig:
    """A stub, an engine on it and what feeds it."""

    def __init__(
        self, server: StubServer, engine: HttpEngine, feed: EngineFeed, weights: MemoryWeights
    ) -> None:
        self.server = server
        self.engine = engine
        self.feed = feed
        self.weights = weights

    @property
    def core(self) -> StubCore:
        return self.server.core

    def swap(self, version: int, state: State) -> None:
        """As the fleet does it."""
        self.weights.offer(version, state)
        staged = self.feed.wait(30)
        self.engine.swap(staged.event.version, staged.state)
        self.feed.swapped(staged, 0.0, 0)


@contextmanager
def rigged(kind: Kind, folder: Path, *, stub: dict[str, Any] | None = None, **settings: Any) -> Iterator[Rig]:
    first = folder / "first"
    write_policy(first, STATES[0], CONFIG)
    with ExitStack() as stack:
        server = stack.enter_context(
            running_stub(StubEngineConfig(kind=kind, model_path=first, **(stub or {})))
        )
        config = EngineConfig(kind=kind, url=server.url, root=folder / "root", first=first, **settings)
        weights = MemoryWeights()
        feed = EngineFeed(weights, engine_target(config, kv="keep"))
        stack.callback(feed.close)
        engine = HttpEngine(wire_of(kind, config), feed, config)
        stack.callback(engine.close)
        yield Rig(server, engine, feed, weights)


def wire_of(kind: Kind, config: EngineConfig) -> Wire:
    if kind == "vllm":
        return VllmWire()
    return SglangWire(
        layers=CONFIG.num_hidden_layers,
        top_k=CONFIG.num_experts_per_tok,
        original_logprobs=config.original_logprobs,
    )


def requests(count: int, *, new: int = 16, temperature: float = 1.0) -> list[SampleRequest]:
    rng = np.random.default_rng(5)
    return [
        SampleRequest(
            f"g.{index}",
            rng.integers(2, CONFIG.vocab_size, 3 + index % 7),
            new,
            1_000 + index,
            temperature,
            True,
            (7,),
        )
        for index in range(count)
    ]


def drain(engine: Engine) -> dict[str, Sampled]:
    done: dict[str, Sampled] = {}
    for _ in range(3_000):  # of up to 20 ms
        if not engine.running:
            return done
        done |= {each.request_id: each for each in engine.step()}
    raise AssertionError(f"{engine.running} requests have not ended")


def until(there: Callable[[], bool], seconds: float = 60) -> None:
    waited = threading.Event()
    for _ in range(int(seconds / 0.005)):
        if there():
            return
        waited.wait(0.005)
    raise AssertionError("it did not come")


def same(found: dict[str, Sampled], expected: dict[str, Sampled]) -> None:
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert np.array_equal(found[name].token_ids, each.token_ids), name
        assert np.array_equal(found[name].versions, each.versions)
        np.testing.assert_allclose(found[name].logprobs, each.logprobs, atol=1e-5)
        assert np.array_equal(np.asarray(found[name].routes), np.asarray(each.routes))
        assert found[name].finish_reason == each.finish_reason


@pytest.mark.parametrize("kind", KINDS)
def test_they_sample_what_the_built_in_engine_samples(kind: Kind, tmp_path: Path) -> None:
    asked = requests(40)
    builtin = TorchEngine(CONFIG, 64)
    builtin.swap(4, STATES[1])
    builtin.submit(asked)
    expected = drain(builtin)
    assert {each.finish_reason for each in expected.values()} == {"stop", "length"}
    with rigged(kind, tmp_path) as rig:
        assert rig.engine.step() == []
        rig.swap(4, STATES[1])
        assert rig.engine.version == 4
        rig.engine.submit(asked)
        assert rig.engine.running == 40
        same(drain(rig.engine), expected)


def long_request(state: State, *, new: int = 60) -> SampleRequest:
    engine = TorchEngine(CONFIG, 100)
    engine.swap(0, state)
    asked = [SampleRequest(f"long.{seed}", np.array([3, 4, 5]), new, seed) for seed in range(100)]
    engine.submit(asked)
    done = drain(engine)
    return max(asked, key=lambda each: done[each.request_id].token_ids.size)


@pytest.mark.parametrize("kind", KINDS)
def test_c02_a_swap_in_flight_makes_two_spans_and_loses_nothing(kind: Kind, tmp_path: Path) -> None:
    with rigged(kind, tmp_path) as rig:
        rig.swap(1, STATES[1])
        rig.core.step_delay_s = 0.5
        rig.engine.submit([long_request(STATES[1])])
        until(lambda: rig.core.decoded > 1)
        rig.swap(2, STATES[2])
        rig.core.step_delay_s = 0.0
        [sampled] = drain(rig.engine).values()
        assert sampled.versions[0] == 1
        assert sampled.versions[-1] == 2
        assert (np.diff(sampled.versions) >= 0).all()
        assert sampled.routes is not None
        assert len(sampled.routes) == 3 + len(sampled.token_ids) - 1


@pytest.mark.parametrize("kind", KINDS)
def test_abort_hands_back_what_there_is(kind: Kind, tmp_path: Path) -> None:
    with rigged(kind, tmp_path, abort_s=30.0) as rig:
        rig.swap(1, STATES[1])
        rig.core.step_delay_s = 0.5
        one = long_request(STATES[1])
        rig.engine.submit([one._replace(request_id="g.1"), one._replace(request_id="g.10")])
        until(lambda: rig.core.running == 2 and rig.core.decoded > 1)
        ended = rig.engine.abort()
        assert rig.engine.running == 0
        assert sorted(each.request_id for each in ended) == ["g.1", "g.10"]
        for each in ended:
            assert each.finish_reason == "abort"
            assert len(each.token_ids) == len(each.logprobs) == len(each.versions)
            assert set(each.versions.tolist()) <= {1}
        assert any(len(each.token_ids) for each in ended)


@contextmanager
def process(folder: Path, port: int, step_delay_s: float) -> Iterator[subprocess.Popen[str]]:
    """A stub server of its own, listening."""
    command = [str(Path(sys.executable).parent / "rollwire"), "stub-engine", str(folder), "--port", str(port)]
    started = subprocess.Popen(
        [*command, "--step-delay-s", str(step_delay_s)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    with started:
        try:
            assert started.stdout is not None
            assert "vllm stub at" in started.stdout.readline()
            yield started
        finally:
            started.kill()


def test_an_engine_that_is_killed_gets_its_weights_and_its_requests_back(tmp_path: Path) -> None:
    """kill -9 with requests in flight, and another process on the same port: it knows neither the requests nor the version."""
    asked = requests(12, new=30)
    builtin = TorchEngine(CONFIG, 64)
    builtin.swap(3, STATES[1])
    builtin.submit(asked)
    expected = drain(builtin)
    first, port = tmp_path / "first", choose_port("port", None, None, set())
    write_policy(first, STATES[0], CONFIG)
    config = EngineConfig(kind="vllm", url=f"http://127.0.0.1:{port}", root=tmp_path / "root", first=first)
    weights = MemoryWeights()
    with EngineCalls(config.url) as look, ExitStack() as stack:
        feed = EngineFeed(weights, engine_target(config, kv="keep"))
        stack.callback(feed.close)
        engine = HttpEngine(VllmWire(), feed, config)
        stack.callback(engine.close)
        with process(first, port, 0.5) as server:
            weights.offer(3, STATES[1])
            engine.swap(3, feed.wait(30).state)
            engine.submit(asked)
            done = {each.request_id: each for _ in range(20) for each in engine.step()}
            assert engine.running
            server.kill()
            server.wait(30)
        with process(first, port, 0.0) as server:
            done |= drain(engine)
            assert look.get("/weight_info") == {"weight_version": "3"}
            assert set(look.post("/weight_checker", {"action": "checksum"})["checksums"].values()) == set(
                checksums(STATES[1]).values()
            )
            server.send_signal(signal.SIGTERM)
            assert server.wait(30) == 0
    same(done, expected)


def test_an_engine_that_stays_away_is_given_up(tmp_path: Path) -> None:
    with rigged("vllm", tmp_path, patience_s=0.5) as rig:
        rig.swap(1, STATES[1])
        rig.server.stop()
        rig.engine.submit(requests(1))
        with pytest.raises(EngineUnavailable, match="was away"):
            drain(rig.engine)


def test_tokens_of_other_weights_are_not_taken_for_ours(tmp_path: Path) -> None:
    """Somebody else loads a version into the engine: what it samples is asked for again, from the version that is ours."""
    with rigged("vllm", tmp_path) as rig:
        rig.swap(5, STATES[1])
        rig.core.load(tmp_path / "first")
        rig.core.set_label("6")
        rig.engine.submit(requests(3))
        done = drain(rig.engine)
        assert {int(version) for each in done.values() for version in each.versions} == {5}
        assert rig.core.checksums() == checksums(STATES[1])


@pytest.mark.parametrize("kind", KINDS)
def test_missing_routes_are_not_made_up(kind: Kind, tmp_path: Path) -> None:
    with rigged(kind, tmp_path, stub={"return_routed_experts": False}) as rig:
        rig.swap(1, STATES[1])
        rig.engine.submit([requests(1)[0]._replace(record_routes=False)])
        [sampled] = drain(rig.engine).values()
        assert sampled.routes is None
        rig.engine.submit(requests(1))
        with pytest.raises(EngineRefused, match="enable-return-routed-experts"):
            drain(rig.engine)


def test_sglangs_logprobs_at_another_temperature_are_not_taken(tmp_path: Path) -> None:
    with rigged("sglang", tmp_path) as rig:
        rig.swap(1, STATES[1])
        with pytest.raises(ConfigError, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
            rig.engine.submit(requests(2, temperature=0.7))
        assert rig.engine.running == 0
    with rigged("sglang", tmp_path / "b", stub={"original_logprobs": True}, original_logprobs=True) as rig:
        rig.swap(1, STATES[1])
        builtin = TorchEngine(CONFIG, 64)
        builtin.swap(1, STATES[1])
        for engine in (builtin, rig.engine):
            engine.submit(requests(8, temperature=0.7))
        same(drain(rig.engine), drain(builtin))


@pytest.mark.parametrize(
    ("spans", "error"),
    [
        ([{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 3}], None),
        ([{"version": "1", "start": 0, "end": 2}], EngineRefused),
        ([{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 1, "end": 3}], EngineRefused),
        ([{"version": "1", "start": 0, "end": 4}], EngineRefused),
        ([{"version": "1", "start": 1, "end": 3}], EngineRefused),
        ([{"start": 0, "end": 3}], EngineRefused),
        (None, EngineRefused),
        ([{"version": "default", "start": 0, "end": 3}], UnknownWeights),
        ([{"version": "3", "start": 0, "end": 3}], UnknownWeights),
    ],
)
def test_c02_spans_cover_the_tokens_or_are_refused(spans: Any, error: type[Exception] | None) -> None:
    if error is None:
        assert version_array(spans, 3, {1, 2}).tolist() == [1, 1, 2]
    else:
        with pytest.raises(error):
            version_array(spans, 3, {1, 2})


def test_c17_answers_that_do_not_fit_are_refused() -> None:
    request = requests(1)[0]
    rows = request.prompt_ids.size + 1
    routes = base64.b64encode(np.zeros((rows, 3, 2), np.int32).tobytes()).decode()
    meta = {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-0.5, 4, None], [-0.25, 1, None]],
        "weight_versions": [{"version": "1", "start": 0, "end": 2}],
        "routed_experts": routes,
    }
    answer: dict[str, Any] = {"output_ids": [4, 1], "meta_info": meta}
    wire = SglangWire(layers=3, top_k=2, original_logprobs=False)
    good = wire.read(request, answer, {1})
    assert good.logprobs.tolist() == [-0.5, -0.25]
    short = base64.b64encode(np.zeros((rows - 1, 3, 2), np.int32).tobytes()).decode()
    for bad in (
        {"output_token_logprobs": [[-0.5, 4, None]]},
        {"output_token_logprobs": [[-0.5, 4, None], [-0.25, 2, None]]},
        {"output_token_logprobs": [[None, 4, None], [-0.25, 1, None]]},
        {"routed_experts": short},
        {"routed_experts": routes[:-8]},
        {"routed_experts": None},
        {"finish_reason": {"type": "repetition"}},
        {"finish_reason": {"type": "abort", "status_code": 500, "message": "out of memory"}},
    ):
        with pytest.raises(EngineRefused):
            wire.read(request, {**answer, "meta_info": meta | bad}, {1})
    with pytest.raises(EngineRefused):
        VllmWire().read(request, answer, {1})


def test_a_version_that_the_engine_does_not_take_leaves_the_one_before(tmp_path: Path) -> None:
    with rigged("sglang", tmp_path) as rig:
        rig.swap(1, STATES[1])
        rig.weights.offer(2, STATES[2])
        staged = rig.feed.wait(30)
        newest = max((tmp_path / "root" / "versions").iterdir(), key=lambda path: path.name)
        shard = next(newest.glob("*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-1])
        with pytest.raises(TargetFailed):
            rig.engine.swap(staged.event.version, staged.state)
        assert rig.engine.version == 1
        rig.engine.submit(requests(3))
        assert {int(v) for each in drain(rig.engine).values() for v in each.versions} == {1}


@pytest.mark.parametrize("kind", KINDS)
def test_a_rollout_worker_runs_on_it(kind: Kind, tmp_path: Path) -> None:
    """Rollouts and their traces, under two versions, through the fleet's own loop."""
    log = MemoryLog({"rollouts": 4, "rewards": 4, "routing-traces": 4, "group-fates": 4})
    stop = threading.Event()
    with rigged(kind, tmp_path) as rig:
        rig.weights.offer(0, STATES[1])
        config = FleetConfig(max_open_groups=12, group_size=4, max_running=16)
        worker = threading.Thread(
            target=run_fleet,
            args=(log, rig.engine, Countdown(), rig.feed, config),
            kwargs={"model": "policy", "lineage": "l", "prefix": "t.", "stop": stop},
        )
        worker.start()
        try:
            until(lambda: written(log) >= 16)
            rig.weights.offer(1, STATES[2])
            until(lambda: bool(rig.weights.swaps) and rig.weights.swaps[-1].version == 1)
            until(lambda: written(log) >= 48)
        finally:
            stop.set()
            worker.join(60)
        assert not worker.is_alive()
        events = [decode_record(record) for record in every(log)]
    rollouts = {event.rollout_id: event for event in events if isinstance(event, Rollout)}
    traces = {event.rollout_id: event for event in events if isinstance(event, RoutingTrace)}
    assert len(rollouts) >= 48
    assert rollouts.keys() == traces.keys()
    assert {span.version for each in rollouts.values() for span in each.spans} <= {0, 1}


def written(log: MemoryLog) -> int:
    partitions = [TopicPartition("rollouts", p) for p in range(4)]
    return sum(log.end_offsets(partitions).values())


def every(log: MemoryLog) -> list[Any]:
    reader = log.reader()
    reader.assign({TopicPartition(t, p): 0 for t in ("rollouts", "routing-traces") for p in range(4)})
    records: list[Any] = []
    while batch := reader.poll(1_000, 0.0):
        records += batch
    reader.close()
    return records
