"""Demands on the version: what is met, what is 409, and what an answer says it came from; the pure part and the proxy over real HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.consumers.weights.gate import (
    BadDemand,
    Demand,
    format_spans,
    judge_answer,
    judge_start,
    spans_of_answer,
    take_demand,
    version_of,
)
from rollwire.consumers.weights.gate_proxy import GateConfig, gate_app
from rollwire.kernels.policy.config import PolicyConfig
from rollwire.ops.http_server import served
from rollwire.ops.stub_engine.config import Kind, StubEngineConfig
from rollwire.ops.stub_engine.serve import StubServer, running_stub
from rollwire.ops.stub_engine.weights import fresh_policy, write_policy
from rollwire.producers.engine_torch import TorchEngine
from rollwire.streams.seams.engine import Sampled, SampleRequest

CONFIG = PolicyConfig()
PROMPT = [3, 4, 5, 6]


def test_a_demand_is_taken_out_of_headers_and_body() -> None:
    body: dict[str, Any] = {"prompt": [1], "min_weight_version": 3, "exact_weight_version": "7"}
    demand, rest = take_demand({}, body)
    assert demand == Demand(3, 7)
    assert rest == {"prompt": [1]}
    assert "min_weight_version" in body
    assert take_demand({"x-rollwire-min-version": "3"}, {"min_weight_version": 3})[0] == Demand(3)
    assert take_demand({}, {})[0] == Demand()


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"x-rollwire-min-version": "latest"}, {}),
        ({"x-rollwire-min-version": "-1"}, {}),
        ({"x-rollwire-version": "٣"}, {}),
        ({"x-rollwire-version": "9" * 40}, {}),
        ({}, {"min_weight_version": True}),
        ({}, {"min_weight_version": 1.0}),
        ({}, {"exact_weight_version": -1}),
        ({}, {"exact_weight_version": [1]}),
        ({"x-rollwire-version": "3"}, {"exact_weight_version": 4}),
        ({"x-rollwire-version": "3", "x-rollwire-min-version": "4"}, {}),
    ],
)
def test_a_demand_that_says_nothing_is_refused(headers: dict[str, str], body: dict[str, Any]) -> None:
    with pytest.raises(BadDemand):
        take_demand(headers, body)


@settings(deadline=None)
@given(st.integers(0, 20), st.none() | st.integers(0, 20), st.none() | st.integers(0, 20))
def test_a_demand_is_met_by_the_versions_that_it_names(
    version: int, minimum: int | None, exact: int | None
) -> None:
    demand = Demand(minimum, exact)
    met = (minimum is None or version >= minimum) and (exact is None or version == exact)
    conflict = judge_start(demand, str(version))
    assert (conflict is None) == met
    assert judge_answer(demand, "0", [{"version": str(version), "start": 0, "end": 1}]) is None or not met
    if conflict is not None:
        assert conflict.may_come == (version < max(each for each in demand if each is not None))
        assert str(version) in conflict.message


def test_weights_of_no_version_meet_no_demand() -> None:
    assert judge_start(Demand(0), "default") is not None
    assert judge_start(Demand(), "default") is None
    assert version_of("default") is None
    assert judge_answer(Demand(0), "3", None) is not None
    assert judge_answer(Demand(), "3", None) is None


def test_a_swap_in_the_middle_breaks_an_exact_demand_and_not_a_minimum() -> None:
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 9}]
    assert judge_answer(Demand(minimum=3), "3", spans) is None
    conflict = judge_answer(Demand(exact=3), "3", spans)
    assert conflict is not None
    assert "3:0-2,4:2-9" in conflict.message


def test_spans_are_found_where_each_engine_tells_them() -> None:
    spans = [{"version": "3", "start": 0, "end": 2}]
    assert spans_of_answer({"choices": [{"weight_versions": spans}, {"weight_versions": spans}]}) == spans * 2
    assert spans_of_answer({"meta_info": {"weight_versions": spans}}) == spans
    assert spans_of_answer([{"meta_info": {"weight_versions": spans}}] * 2) == spans * 2
    assert spans_of_answer({"choices": [], "metadata": {"weight_versions": spans}}) == spans
    nothings: tuple[Any, ...] = (
        None,
        [],
        {},
        {"choices": []},
        {"choices": [{"weight_versions": spans}, {}]},
        {"meta_info": {}},
        3,
    )
    for nothing in nothings:
        assert spans_of_answer(nothing) is None
    assert format_spans(spans) == "3:0-2"


@pytest.fixture(params=["vllm", "sglang"])
def behind(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, StubServer]]:
    """A gate's URL, and the engine behind it, at version 5."""
    torch.set_num_threads(1)
    kind: Kind = request.param
    write_policy(tmp_path, fresh_policy(CONFIG, 0), CONFIG)
    with (
        running_stub(StubEngineConfig(kind=kind, model_path=tmp_path, weight_version="5")) as server,
        served(gate_app(GateConfig(kind=kind, url=server.url)), lifespan=True) as gate,
    ):
        yield gate.url, server


def ask(url: str, body: dict[str, Any] | None = None, **headers: str) -> httpx.Response:
    named = {f"X-Rollwire-{name.replace('_', '-')}": value for name, value in headers.items()}
    question = {"prompt": PROMPT, "max_tokens": 6, "seed": 3, **(body or {})}
    return httpx.post(f"{url}/v1/completions", json=question, headers=named, timeout=60)


def long_seed() -> int:
    """The seed whose answer is the longest of some."""
    engine = TorchEngine(CONFIG, 100)
    engine.swap(0, fresh_policy(CONFIG, 0))
    engine.submit([SampleRequest(str(seed), np.array(PROMPT), 60, seed) for seed in range(100)])
    done: list[Sampled] = []
    while engine.running:
        done += engine.step()
    return int(max(done, key=lambda each: each.token_ids.size).request_id)


@pytest.mark.torch
def test_the_gate_answers_409_where_a_demand_is_not_met(behind: tuple[str, StubServer]) -> None:
    url, server = behind
    for headers, body in (
        ({}, {}),
        ({"min_version": "5"}, {}),
        ({"min_version": "4"}, {}),
        ({"version": "5"}, {}),
        ({}, {"min_weight_version": 2}),
        ({}, {"exact_weight_version": 5}),
    ):
        answer = ask(url, body, **headers)
        assert answer.status_code == 200, answer.text
        spans = spans_of_answer(answer.json())
        assert spans is not None
        assert [span["version"] for span in spans] == ["5"]
        assert answer.headers["X-Rollwire-Weight-Versions"] == format_spans(spans)
        assert answer.headers["X-Rollwire-Served-Version"] == "5"
    for headers, body, later in (
        ({"min_version": "6"}, {}, True),
        ({"version": "4"}, {}, False),
        ({}, {"exact_weight_version": 9}, True),
    ):
        asked = len(server.core.calls)
        answer = ask(url, body, **headers)
        assert answer.status_code == 409
        assert answer.json()["error"]["served_version"] == "5"
        assert ("Retry-After" in answer.headers) == later
        assert len(server.core.calls) == asked + 1  # the engine was asked for its version alone
    server.core.set_label("6")
    assert ask(url, min_version="6").status_code == 200
    assert ask(url, version="latest").status_code == 400


@pytest.mark.torch
def test_an_answer_that_a_swap_cut_is_withheld_from_who_demanded_one_version(
    behind: tuple[str, StubServer],
) -> None:
    url, server = behind
    waited = threading.Event()
    server.core.step_delay_s = 0.5
    with ThreadPoolExecutor(2) as pool:
        seed = long_seed()
        sent = [
            (demand, pool.submit(ask, url, {"max_tokens": 60, "seed": seed}, **{demand: "5"}))
            for demand in ("version", "min_version")
        ]
        for _ in range(6_000):
            if server.core.running == 2 and server.core.decoded > 1:
                break
            waited.wait(0.005)
        server.core.set_label("6")
        server.core.step_delay_s = 0.0
        answers = {demand: future.result(60) for demand, future in sent}
    assert answers["min_version"].status_code == 200
    assert answers["min_version"].headers["X-Rollwire-Served-Version"] == "6"
    assert answers["version"].status_code == 409
    assert [span["version"] for span in answers["version"].json()["error"]["weight_versions"]] == ["5", "6"]


@pytest.mark.torch
def test_the_gate_lets_nobody_change_the_weights(behind: tuple[str, StubServer]) -> None:
    url, server = behind
    asked = len(server.core.calls)
    for path in (
        "/pause",
        "/collective_rpc",
        "/update_weight_version",
        "/pause_generation",
        "/update_weights_from_disk",
    ):
        assert httpx.post(url + path, json={"new_version": "9"}).status_code == 404
    assert len(server.core.calls) == asked
    assert httpx.get(url + "/health").status_code == 200
    assert httpx.post(url + "/v1/completions", content=b"[1]").status_code == 400
    assert httpx.post(url + "/v1/completions", content=b"{").status_code == 400
    server.stop()
    assert ask(url, min_version="1").status_code == 502
    assert ask(url).status_code == 502
