"""`rollwire stub-engine`: a server with the HTTP calls of vLLM or SGLang, over the built-in policy."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from rollwire.ops.stack.ports import HOST


def stub_engine(
    model_path: Path,
    /,
    *,
    kind: Literal["vllm", "sglang"] = "vllm",
    port: int = 8000,
    host: str = HOST,
    max_running: int = 64,
    step_delay_s: float = 0.0,
    original_logprobs: Annotated[bool, Parameter(negative=())] = False,
    fresh: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Answer the HTTP calls of an inference engine until told to stop: weights and generation, no others.

    It loads a folder of safetensors with the config.json of a policy (the anchor of a run: `rollwire weights export`),
    and samples with the built-in engine where torch is installed. `$ROLLWIRE_ENGINE_KEY` is the API key that it wants.

    Parameters
    ----------
    model_path
        Folder that is loaded first.
    kind
        Whose calls: vLLM 0.33 (as with VLLM_SERVER_DEV_MODE=1) or SGLang 0.5.23.
    port
        0: a free one, named on standard output.
    max_running
        Requests decoded at once.
    step_delay_s
        Seconds added to each decode step, as a larger model would take.
    original_logprobs
        SGLang: logprobs at temperature 1, as with SGLANG_RETURN_ORIGINAL_LOGPROB=1.
    fresh
        Write a random policy of the demo's shape into the folder first, where there is none.
    """
    from rollwire.kernels.policy.config import PolicyConfig
    from rollwire.ops.http_server import run_server
    from rollwire.ops.stub_engine.config import StubEngineConfig
    from rollwire.ops.stub_engine.core import StubCore
    from rollwire.ops.stub_engine.serve import stub_app
    from rollwire.ops.stub_engine.weights import fresh_policy, write_policy

    if fresh and not model_path.exists():
        write_policy(model_path, fresh_policy(PolicyConfig(), 0), PolicyConfig())
    core = StubCore(
        StubEngineConfig(
            kind=kind,
            model_path=model_path,
            max_running=max_running,
            step_delay_s=step_delay_s,
            original_logprobs=original_logprobs,
            api_key=os.environ.get("ROLLWIRE_ENGINE_KEY") or None,
        )
    )
    try:
        run_server(
            stub_app(core),
            host,
            port,
            ready=lambda url: print(
                f"{kind} stub at {url}, weights of {model_path}", file=sys.stdout, flush=True
            ),
        )
    finally:
        core.close()
