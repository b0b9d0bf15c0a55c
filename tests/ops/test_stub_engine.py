"""The stub servers over real HTTP: the listed calls and no others, true spans, logprobs and routes, torn weights."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from rollwire.kernels.policy.config import PolicyConfig, hf_config, policy_of
from rollwire.kernels.policy.model import Policy
from rollwire.kernels.policy.states import load_state, to_state
from rollwire.kernels.tensors import State
from rollwire.ops.stub_engine.config import Kind, StubEngineConfig
from rollwire.ops.stub_engine.serve import StubServer, running_stub
from rollwire.ops.stub_engine.weights import checksums, write_policy
from rollwire.producers.engine_torch import TorchEngine
from rollwire.schemas.errors import ConfigError
from rollwire.streams.seams.engine import Sampled, SampleRequest

pytestmark = pytest.mark.torch

CONFIG = PolicyConfig()
PROMPT = [3, 4, 5, 6]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def state_of(seed: int) -> State:
    policy = Policy(CONFIG, seed=seed)
    with torch.no_grad():
        policy.lm_head.weight.mul_(3.0)
    return to_state(policy)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("versions")
    for seed in range(2):
        write_policy(root / str(seed), state_of(seed), CONFIG)
    return [root / str(seed) for seed in range(2)]


def stub(kind: Kind, folder: Path, **more: Any) -> Iterator[StubServer]:
    with running_stub(StubEngineConfig(kind=kind, model_path=folder, **more)) as server:
        yield server


@pytest.fixture
def vllm(folders: list[Path]) -> Iterator[StubServer]:
    yield from stub("vllm", folders[0])


@pytest.fixture
def sglang(folders: list[Path]) -> Iterator[StubServer]:
    yield from stub("sglang", folders[0])


def post(server: StubServer, path: str, body: Any = None, expect: int = 200) -> Any:
    answer = httpx.post(server.url + path, json=body, timeout=60)
    assert answer.status_code == expect, answer.text
    return answer.json() if answer.content else None


def get(server: StubServer, path: str) -> Any:
    answer = httpx.get(server.url + path, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json() if answer.content else None


def generate(server: StubServer, seed: int = 1, count: int = 12, name: str | None = None) -> Any:
    if server.core.config.kind == "vllm":
        sampling = {"max_tokens": count, "seed": seed, "logprobs": 0, "temperature": 1.0}
        body: dict[str, Any] = {"token_ids": PROMPT, "sampling_params": sampling}
        return post(server, "/inference/v1/generate", body | ({"request_id": name} if name else {}))
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": count, "sampling_seed": seed},
        "return_logprob": True,
        "return_routed_experts": True,
    }
    return post(server, "/generate", body | ({"rid": name} if name else {}))


def long_seed() -> int:
    """The seed whose answer by the first version is the longest of some."""
    engine = TorchEngine(CONFIG, 200)
    engine.swap(0, state_of(0))
    engine.submit([SampleRequest(str(seed), np.array(PROMPT), 60, seed) for seed in range(200)])
    done: list[Sampled] = []
    while engine.running:
        done += engine.step()
    return int(max(done, key=lambda each: each.token_ids.size).request_id)


def check_scored(state: State, tokens: list[int], logprobs: list[float], routes: Any) -> None:
    policy = Policy(CONFIG)
    load_state(policy, state)
    ids = np.array([*PROMPT, *tokens])
    with torch.no_grad():
        output = policy.forward_packed(torch.from_numpy(ids), np.array([0, len(ids)], np.int32))
    scored = output.logits_TV.log_softmax(-1).numpy()
    at = np.arange(len(PROMPT), len(ids))
    np.testing.assert_allclose(logprobs, scored[at - 1, tokens], atol=1e-5)
    assert np.array_equal(routes, output.router_TLK[:-1].numpy())


def test_a_vllm_answer_is_what_a_scoring_pass_says(vllm: StubServer) -> None:
    answer = generate(vllm, name="a")
    assert answer["request_id"] == "generate-tokens-a"
    [choice] = answer["choices"]
    tokens = choice["token_ids"]
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": len(tokens)}]
    routes = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    content = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == tokens
    check_scored(state_of(0), tokens, [entry["logprob"] for entry in content], routes)


def test_an_sglang_answer_is_what_a_scoring_pass_says(sglang: StubServer) -> None:
    answer = generate(sglang)
    meta, tokens = answer["meta_info"], answer["output_ids"]
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": len(tokens)}]
    shape = (len(PROMPT) + len(tokens) - 1, CONFIG.num_hidden_layers, CONFIG.num_experts_per_tok)
    routes = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).reshape(shape)
    assert [entry[1] for entry in meta["output_token_logprobs"]] == tokens
    check_scored(state_of(0), tokens, [entry[0] for entry in meta["output_token_logprobs"]], routes)


def frozen(server: StubServer, count: int) -> tuple[Future[Any], ThreadPoolExecutor]:
    """A request in flight that waits, its first tokens sampled, behind a pause."""
    pool = ThreadPoolExecutor(1)
    sent = pool.submit(generate, server, long_seed(), count)
    waited = threading.Event()
    for _ in range(6_000):
        if server.core.decoded > 1:
            break
        waited.wait(0.005)
    return sent, pool


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_weights_change_under_a_request_and_the_spans_say_where(kind: Kind, folders: list[Path]) -> None:
    for server in stub(kind, folders[0], step_delay_s=0.5):
        sent, pool = frozen(server, 60)
        if kind == "vllm":
            post(server, "/pause?mode=keep")
            server.core.step_delay_s = 0.0
            assert get(server, "/is_paused") == {"is_paused": True}
            arguments = {"weights_path": str(folders[1]), "is_checkpoint_format": True}
            rpc = {"method": "reload_weights", "kwargs": arguments}
            assert post(server, "/collective_rpc", rpc) == {"results": [None]}
            assert post(server, "/reset_prefix_cache") == {"success": False}
            post(server, "/update_weight_version", {"new_version": "1"})
            assert get(server, "/weight_info") == {"weight_version": "1"}
            post(server, "/resume")
            spans = sent.result(60)["choices"][0]["weight_versions"]
        else:
            post(server, "/pause_generation", {"mode": "in_place"})
            server.core.step_delay_s = 0.0
            body = {"model_path": str(folders[1]), "weight_version": "1"}
            told = post(server, "/update_weights_from_disk", body, expect=400)  # the cache is in use
            assert told["success"] is False
            assert "not flushed" in told["message"]
            assert post(server, "/update_weights_from_disk", body | {"flush_cache": False})["success"]
            assert get(server, "/model_info")["weight_version"] == "1"
            post(server, "/continue_generation", {})
            spans = sent.result(60)["meta_info"]["weight_versions"]
        pool.shutdown()
        assert [span["version"] for span in spans] == ["default", "1"]
        assert spans[0]["start"] == 0
        assert 0 < spans[0]["end"] == spans[1]["start"] < spans[1]["end"]
        assert server.core.checksums() == checksums(state_of(1))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_load_that_fails_leaves_the_weights_torn(kind: Kind, folders: list[Path], tmp_path: Path) -> None:
    write_policy(tmp_path, state_of(1), CONFIG, shard_bytes=200_000)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    shards[1].write_bytes(shards[1].read_bytes()[:-1])
    for server in stub(kind, folders[0]):
        if kind == "vllm":
            rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
            post(server, "/collective_rpc", rpc, expect=500)
        else:
            body = {"model_path": str(tmp_path), "weight_version": "1"}
            post(server, "/update_weights_from_disk", body, expect=400)
        held, old, new = server.core.checksums(), checksums(state_of(0)), checksums(state_of(1))
        assert held != old
        assert held != new
        assert all(held[name] in (old[name], new[name]) for name in held)
        assert server.core.label == "default"


def test_abort_hands_back_what_there_is(folders: list[Path]) -> None:
    for server in stub("vllm", folders[0], step_delay_s=0.5):
        sent, pool = frozen(server, 200)
        post(server, "/pause?mode=wat", expect=400)
        post(server, "/abort_requests", {"request_ids": ["no such"]})
        post(server, "/pause")
        [choice] = sent.result(60)["choices"]
        assert choice["finish_reason"] == "abort"
        assert 0 < len(choice["token_ids"]) < 200
        refused = httpx.post(
            server.url + "/inference/v1/generate",
            json={"token_ids": PROMPT, "sampling_params": {}},
            timeout=60,
        )
        assert refused.status_code == 503
        server.core.step_delay_s = 0.0
        post(server, "/resume")
        assert generate(server)["choices"][0]["finish_reason"] in ("stop", "length")
        pool.shutdown()


def test_one_request_of_several_is_aborted(folders: list[Path]) -> None:
    for server in stub("vllm", folders[0], step_delay_s=0.5):
        with ThreadPoolExecutor(3) as pool:
            seed = long_seed()
            sent = {name: pool.submit(generate, server, seed, 80, name) for name in ("a", "b", "c")}
            waited = threading.Event()
            for _ in range(6_000):
                if server.core.running == 3 and server.core.decoded > 1:
                    break
                waited.wait(0.005)
            post(server, "/inference/v1/abort_requests", {"request_ids": ["generate-tokens-b"]})
            server.core.step_delay_s = 0.0
            choices = {name: future.result(60)["choices"][0] for name, future in sent.items()}
        assert choices["b"]["finish_reason"] == "abort"
        count = len(choices["b"]["token_ids"])
        assert choices["a"]["token_ids"] == choices["c"]["token_ids"]  # of one seed
        assert choices["a"]["token_ids"][:count] == choices["b"]["token_ids"]
        assert choices["a"]["finish_reason"] != "abort"


def test_calls_that_are_not_listed_and_bodies_that_are_wrong_are_refused(
    vllm: StubServer, sglang: StubServer
) -> None:
    for path in ("/pause_generation", "/update_weights_from_disk", "/load_weights", "/generate"):
        post(vllm, path, {}, expect=404)
    for path in ("/pause", "/collective_rpc", "/update_weights", "/inference/v1/generate"):
        post(sglang, path, {}, expect=404)
    assert httpx.get(vllm.url + "/pause").status_code == 405
    post(vllm, "/update_weight_version", {"version": "1"}, expect=400)
    post(vllm, "/update_weight_version", {"new_version": 1}, expect=400)
    post(vllm, "/collective_rpc", {"kwargs": {}}, expect=400)
    post(vllm, "/collective_rpc", {"method": "pickle_it"}, expect=501)
    post(vllm, "/update_weights", {"update_info": 3}, expect=400)
    post(vllm, "/update_weights", {"update_info": {}}, expect=501)
    post(vllm, "/weight_checker", {"action": "compare"}, expect=400)
    post(sglang, "/update_weights_from_disk", {"model_path": "/nowhere", "version": "1"}, expect=400)
    post(sglang, "/pause_generation", {"mode": "keep"}, expect=400)
    sampling = {"max_tokens": 3, "top_p": 0.5}
    post(vllm, "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": sampling}, expect=400)
    post(vllm, "/inference/v1/generate", {"token_ids": [99], "sampling_params": {}}, expect=400)
    tempered = {"input_ids": PROMPT, "sampling_params": {"temperature": 0.5}, "return_logprob": True}
    post(sglang, "/generate", tempered, expect=400)
    assert vllm.core.label == sglang.core.label == "default"
    assert vllm.core.checksums() == sglang.core.checksums() == checksums(state_of(0))


def test_the_key_guards_what_it_guards_there(folders: list[Path]) -> None:
    for server in stub("vllm", folders[0], api_key="k"):
        assert httpx.get(server.url + "/weight_info").status_code == 200
        assert httpx.get(server.url + "/v1/models").status_code == 401
        assert httpx.get(server.url + "/v1/models", headers={"Authorization": "Bearer k"}).status_code == 200
    for server in stub("sglang", folders[0], api_key="k"):
        assert httpx.get(server.url + "/model_info").status_code == 401
        assert httpx.get(server.url + "/health").status_code == 200
    for server in stub("vllm", folders[0], dev_mode=False):
        assert httpx.get(server.url + "/weight_info").status_code == 404


def test_checksums_tell_one_version_from_another(
    vllm: StubServer, sglang: StubServer, folders: list[Path]
) -> None:
    first = post(vllm, "/weight_checker", {"action": "checksum"})["checksums"]
    assert {name.removeprefix("dp0:pp0:pcp0:tp0:") for name in first} == set(state_of(0))
    assert post(vllm, "/weight_checker", {"action": "compare", "baseline": first})["match"]
    arguments = {"weights_path": str(folders[1])}
    post(vllm, "/collective_rpc", {"method": "reload_weights", "kwargs": arguments})
    assert not post(vllm, "/weight_checker", {"action": "compare", "baseline": first})["match"]
    before = post(sglang, "/weights_checker", {"action": "checksum"})["per_engine_checksum"]
    post(sglang, "/update_weights_from_disk", {"model_path": str(folders[1])})
    assert post(sglang, "/weights_checker", {"action": "checksum"})["per_engine_checksum"] != before
    rows = post(sglang, "/get_weights_by_name", {"name": "model.norm.weight", "truncate_size": 3})
    assert rows == [1.0, 1.0, 1.0]


def test_completions_carry_the_spans(vllm: StubServer, sglang: StubServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 5, "seed": 3}
    assert post(vllm, "/v1/completions", body)["choices"][0]["weight_versions"] is None
    choice = post(vllm, "/v1/completions", body | {"return_weight_versions": True})["choices"][0]
    assert choice["weight_versions"][0]["version"] == "default"
    assert post(sglang, "/v1/completions", body)["metadata"]["weight_version"] == "default"


def test_a_policys_shape_is_read_back_from_config_json() -> None:
    wide = PolicyConfig(hidden_size=32, num_experts=4, head_dim=8)
    assert policy_of(hf_config(wide)) == wide
    with pytest.raises(ConfigError, match="LlamaForCausalLM"):
        policy_of({"architectures": ["LlamaForCausalLM"]})
