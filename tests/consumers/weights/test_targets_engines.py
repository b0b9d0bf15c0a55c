"""vLLM and SGLang as targets, against the stub servers over real HTTP: swaps under running requests, and every way back."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec
import numpy as np
import pytest
import torch

from rollwire.consumers.weights.targets.engine import NOTE, EngineTarget, tensor_names
from rollwire.consumers.weights.targets.folder import FolderTarget
from rollwire.consumers.weights.targets.sglang import SglangWeights
from rollwire.consumers.weights.targets.target import Sample, Target, Update
from rollwire.consumers.weights.targets.vllm import VllmWeights
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.policy.config import PolicyConfig
from rollwire.kernels.tensors import State
from rollwire.ops.stub_engine.config import Kind, StubEngineConfig
from rollwire.ops.stub_engine.serve import StubServer, running_stub
from rollwire.ops.stub_engine.weights import checksums, fresh_policy, write_policy
from rollwire.producers.engine_torch import TorchEngine
from rollwire.schemas.errors import ConfigError, EngineUnavailable, StateMismatch, TargetFailed
from rollwire.schemas.golden import load_examples
from rollwire.schemas.records import WeightVersion
from rollwire.streams.seams.engine import Sampled, SampleRequest
from rollwire.streams.seams.engine_calls import EngineCalls

pytestmark = pytest.mark.torch

CONFIG = PolicyConfig()
PROMPT = [3, 4, 5, 6]
KINDS: tuple[Kind, ...] = ("vllm", "sglang")
STATES = [fresh_policy(CONFIG, seed) for seed in range(4)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StubServer]:
    write_policy(tmp_path / "first", STATES[0], CONFIG)
    with running_stub(StubEngineConfig(kind=request.param, model_path=tmp_path / "first")) as running:
        yield running


Make = Callable[..., EngineTarget]


@pytest.fixture
def make(server: StubServer, tmp_path: Path) -> Iterator[Make]:
    made: list[EngineTarget] = []

    def new(
        *,
        proof: Literal["label", "fingerprint"] = "fingerprint",
        kv: Literal["keep", "recompute"] = "keep",
        first: Path | None = tmp_path / "first",
    ) -> EngineTarget:
        calls = EngineCalls(server.url, timeout_s=30)
        engine = (
            VllmWeights(calls, kv=kv) if server.core.config.kind == "vllm" else SglangWeights(calls, kv=kv)
        )
        root = tmp_path / "root"
        folder = FolderTarget(root, extra=tmp_path / "first", shard_bytes=200_000)
        made.append(EngineTarget(engine, folder, root, first=first, proof=proof))
        return made[-1]

    yield new
    for target in made:
        target.close()


@pytest.fixture
def target(make: Make) -> EngineTarget:
    return make()


def update(version: int, state: State) -> Update:
    example = next(e.event for e in load_examples("weight-versions") if e.name == "anchor")
    assert isinstance(example, WeightVersion)
    event = msgspec.structs.replace(example, version=version, state_digest=StateDigest.of(state).hex)
    return Update(event, state)


def put(target: Target, version: int, state: State) -> None:
    target.stage(update(version, state))
    target.swap()
    target.keep()


def serves(server: StubServer, label: str, state: State) -> bool:
    core = server.core
    return core.label == label and core.checksums() == checksums(state) and not core.paused


def generate(server: StubServer, seed: int, count: int) -> list[dict[str, Any]]:
    """The spans."""
    if server.core.config.kind == "vllm":
        body: dict[str, Any] = {"token_ids": PROMPT, "sampling_params": {"max_tokens": count, "seed": seed}}
        answer = httpx.post(server.url + "/inference/v1/generate", json=body, timeout=60).json()
        spans: list[dict[str, Any]] = answer["choices"][0]["weight_versions"]
        return spans
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": count, "sampling_seed": seed}}
    meta: dict[str, Any] = httpx.post(server.url + "/generate", json=body, timeout=60).json()["meta_info"]
    told: list[dict[str, Any]] = meta["weight_versions"]
    return told


def long_seed(state: State) -> int:
    engine = TorchEngine(CONFIG, 100)
    engine.swap(0, state)
    engine.submit([SampleRequest(str(seed), np.array(PROMPT), 60, seed) for seed in range(100)])
    done: list[Sampled] = []
    while engine.running:
        done += engine.step()
    return int(max(done, key=lambda each: each.token_ids.size).request_id)


def until(there: Callable[[], bool], seconds: float = 60) -> None:
    waited = threading.Event()
    for _ in range(int(seconds / 0.005)):
        if there():
            return
        waited.wait(0.005)
    raise AssertionError("it did not come")


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_running_requests_go_on_with_the_version_that_is_swapped_in(
    server: StubServer, make: Make, kv: Literal["keep", "recompute"]
) -> None:
    target = make(kv=kv)
    put(target, 1, STATES[1])
    server.core.step_delay_s = 0.5
    with ThreadPoolExecutor(1) as pool:
        before = server.core.decoded
        sent = pool.submit(generate, server, long_seed(STATES[1]), 60)
        until(lambda: server.core.decoded > before + 1)
        target.stage(update(2, STATES[2]))
        assert serves(server, "1", STATES[1])
        assert target.swap() > 0
        server.core.step_delay_s = 0.0
        target.keep()
        spans = sent.result(60)
    assert [span["version"] for span in spans] == ["1", "2"]
    assert 0 < spans[0]["end"] == spans[1]["start"]
    assert serves(server, "2", STATES[2])
    assert target.read_back([Sample("model.norm.weight", 0, 1)]) is None


def test_the_calls_are_those_that_the_engine_documents(server: StubServer, make: Make) -> None:
    target = make(proof="label")
    target.stage(update(1, STATES[1]))
    server.core.calls.clear()
    target.swap()
    if server.core.config.kind == "vllm":
        assert server.core.calls == [
            "POST /pause?mode=keep",
            "POST /collective_rpc",
            "POST /reset_prefix_cache",
            "POST /update_weight_version",
            "GET /weight_info",
            "POST /resume",
        ]
    else:
        assert server.core.calls == [
            "POST /pause_generation",
            "POST /update_weights_from_disk",
            "GET /model_info",
            "POST /continue_generation",
        ]


def cut_a_shard(target: EngineTarget, root: Path) -> None:
    newest = max((root / "versions").iterdir(), key=lambda path: path.name)
    shard = sorted(newest.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-3])


@pytest.mark.parametrize("earlier", [False, True], ids=["its own weights", "a version"])
def test_c34_an_engine_torn_in_the_middle_of_a_load_goes_back(
    server: StubServer, target: EngineTarget, tmp_path: Path, earlier: bool
) -> None:
    if earlier:
        put(target, 1, STATES[1])
    target.stage(update(2, STATES[2]))
    cut_a_shard(target, tmp_path / "root")
    with pytest.raises(TargetFailed, match="safetensors"):
        target.swap()
    assert server.core.paused  # nothing is sampled from torn weights
    old = STATES[1] if earlier else STATES[0]
    assert server.core.checksums() != checksums(old)
    target.undo()
    assert serves(server, "1" if earlier else "default", old)
    target.undo()
    put(target, 3, STATES[3])
    assert serves(server, "3", STATES[3])


def test_an_engine_that_cannot_go_back_stays_paused_until_a_version_is_loaded(
    server: StubServer, make: Make, tmp_path: Path
) -> None:
    target = make(first=None)
    target.stage(update(1, STATES[1]))
    cut_a_shard(target, tmp_path / "root")
    with pytest.raises(TargetFailed):
        target.swap()
    with pytest.raises(TargetFailed, match="stays paused"):
        target.undo()
    assert server.core.paused
    put(target, 2, STATES[2])
    assert serves(server, "2", STATES[2])


def test_a_version_that_the_probe_refuses_is_undone(server: StubServer, target: EngineTarget) -> None:
    put(target, 1, STATES[1])
    target.stage(update(2, STATES[2]))
    target.swap()
    assert serves(server, "2", STATES[2])
    target.undo()
    assert serves(server, "1", STATES[1])
    serving = target.serving()
    assert serving is not None
    assert (serving.version, serving.state_digest) == (1, StateDigest.of(STATES[1]).hex)


def test_an_engine_that_says_yes_and_loads_nothing_is_found_out(
    server: StubServer, target: EngineTarget, tmp_path: Path
) -> None:
    put(target, 1, STATES[1])
    target.stage(update(2, STATES[2]))
    newest = max((tmp_path / "root" / "versions").iterdir(), key=lambda path: path.name)
    served = (tmp_path / "root" / "current").resolve()
    for path in served.glob("*.safetensors"):  # as if the engine had read its old weights again
        shutil.copy(path, newest / path.name)
    with pytest.raises(TargetFailed, match="its weights are those of '1'"):
        target.swap()
    target.undo()
    assert serves(server, "1", STATES[1])


def test_after_a_death_only_what_is_whole_is_taken_over(
    server: StubServer, make: Make, tmp_path: Path
) -> None:
    first = make()
    put(first, 1, STATES[1])
    first.close()
    second = make()
    serving = second.serving()
    assert serving is not None
    assert (serving.version, serving.state_digest) == (1, StateDigest.of(STATES[1]).hex)
    assert checksums(second.reread()) == checksums(STATES[1])
    second.stage(update(2, STATES[2]))
    cut_a_shard(second, tmp_path / "root")
    with pytest.raises(TargetFailed):
        second.swap()
    second.close()  # dies here, between the load and the way back
    assert (tmp_path / "root" / NOTE).exists()
    third = make()
    assert third.serving() is None
    put(third, 2, STATES[2])
    assert serves(server, "2", STATES[2])
    third.close()
    # An engine that was started anew calls its weights by another name, or holds others.
    server.core.set_label("default")
    assert make().serving() is None


def test_an_engine_that_is_gone_is_named(make: Make, server: StubServer) -> None:
    target = make()
    put(target, 1, STATES[1])
    target.stage(update(2, STATES[2]))
    server.stop()
    with pytest.raises(TargetFailed, match="is the engine there"):
        target.swap()
    with pytest.raises(TargetFailed, match="is the engine there"):
        target.undo()


def test_an_engine_that_was_started_anew_is_given_its_version_again(
    server: StubServer, make: Make, tmp_path: Path
) -> None:
    target = make()
    assert not target.heal()
    put(target, 1, STATES[1])
    assert not target.heal()
    server.core.load(tmp_path / "first")
    server.core.set_label("default")
    target.stage(update(2, STATES[2]))  # the next version is ready beside
    assert target.heal()
    assert serves(server, "1", STATES[1])
    server.core.pause("keep", reject=False)
    assert not target.heal()
    assert serves(server, "1", STATES[1])
    target.swap()
    assert serves(server, "2", STATES[2])
    target.undo()
    assert serves(server, "1", STATES[1])
    server.stop()
    with pytest.raises(TargetFailed, match="is the engine there"):
        target.heal()


def test_c27_a_version_that_lacks_a_tensor_of_the_engine_is_refused_before_anything(
    server: StubServer, target: EngineTarget
) -> None:
    put(target, 1, STATES[1])
    renamed = dict(STATES[2])
    renamed["model.norm.scale"] = renamed.pop("model.norm.weight")
    asked = len(server.core.calls)
    with pytest.raises(StateMismatch, match=r"model\.norm\.weight"):
        target.stage(update(2, renamed))
    target.undo()
    assert len(server.core.calls) == asked
    assert serves(server, "1", STATES[1])


def test_a_first_folder_that_holds_no_weights_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(ConfigError, match="no safetensors"):
        tensor_names(tmp_path)


def test_an_engine_that_could_not_be_given_its_version_back_is_given_it_later(
    server: StubServer, target: EngineTarget, tmp_path: Path
) -> None:
    put(target, 1, STATES[1])
    server.core.load(tmp_path / "first")  # it was started anew,
    server.core.set_label("default")
    folder = (tmp_path / "root" / "current").resolve()
    away = folder.rename(tmp_path / "away")  # and its disk is not there yet
    folder.mkdir()
    shutil.copy(away / "rollwire.json", folder)
    with pytest.raises(TargetFailed):
        target.heal()
    with pytest.raises(TargetFailed):
        target.heal()
    shutil.rmtree(folder)
    away.rename(folder)
    assert target.heal()
    assert serves(server, "1", STATES[1])
    assert not target.heal()


def test_a_torn_engine_is_not_resumed_by_a_later_try_that_fails_before_it_loads(
    server: StubServer, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make(first=None)
    target.stage(update(1, STATES[1]))
    cut_a_shard(target, tmp_path / "root")
    with pytest.raises(TargetFailed):
        target.swap()
    with pytest.raises(TargetFailed, match="stays paused"):
        target.undo()
    target.stage(update(2, STATES[2]))
    with monkeypatch.context() as patch:
        patch.setattr(EngineCalls, "post", unanswered)
        with pytest.raises(TargetFailed, match="no answer"):
            target.swap()
    with pytest.raises(TargetFailed, match="stays paused"):
        target.undo()
    assert server.core.paused
    assert (tmp_path / "root" / NOTE).exists()
    put(target, 3, STATES[3])
    assert serves(server, "3", STATES[3])


def unanswered(*_: object, **__: object) -> object:
    raise EngineUnavailable("no answer")
