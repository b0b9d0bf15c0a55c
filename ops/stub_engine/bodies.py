"""The request bodies of both servers that the stub reads, with the servers' own names and defaults.

vLLM 0.33.0: `entrypoints/rl/online/api_router.py`, `entrypoints/serve/dev/*/api_router.py`,
`entrypoints/scale_out/token_in_token_out/protocol.py`, `sampling_params.py`. SGLang 0.5.23: `srt/managers/io_struct.py`,
`srt/sampling/sampling_params.py`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Empty(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    pass


class VllmSampling(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    routed_experts_prompt_start: int = 0


class VllmGenerate(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """POST /inference/v1/generate"""

    token_ids: list[int]
    sampling_params: VllmSampling
    request_id: str | None = None
    model: str | None = None
    return_token_ids: bool | None = None
    stream: bool | None = False
    cache_salt: str | None = None
    priority: int = 0


class VllmCompletion(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """POST /v1/completions, with a prompt of token ids: the stub has no tokenizer."""

    prompt: list[int]
    model: str | None = None
    n: int = 1
    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    stream: bool = False
    return_token_ids: bool | None = None
    return_weight_versions: bool = False
    routed_experts_prompt_start: int = 0


class InitInfo(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    init_info: dict[str, Any]


class UpdateInfo(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    update_info: dict[str, Any] | list[dict[str, Any]]


class FinishUpdate(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    weight_version: str | None = None


class NewVersion(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """vLLM's POST /update_weight_version"""

    new_version: str


class WeightChecker(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    action: Literal["checksum", "reset", "compare"]
    baseline: dict[str, str] | None = None


class CollectiveRpc(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


class ReloadWeights(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The keyword arguments of the worker's method `reload_weights`"""

    weights_path: str | None = None
    is_checkpoint_format: bool = True


class AbortRequests(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    request_ids: list[str] | None = None


class SglangSampling(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    max_new_tokens: int | None = 128
    stop_token_ids: list[int] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    min_new_tokens: int = 0
    n: int = 1
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    sampling_seed: int | None = None


class SglangGenerate(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """POST /generate, with `input_ids`"""

    input_ids: list[int]
    sampling_params: SglangSampling = SglangSampling()
    rid: str | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    return_text_in_logprobs: bool = False
    stream: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    extra_key: str | None = None
    cache_salt: str | None = None


class SglangCompletion(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """POST /v1/completions, with a prompt of token ids"""

    prompt: list[int]
    model: str | None = None
    rid: str | None = None
    n: int = 1
    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    stream: bool = False


class PauseGeneration(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueGeneration(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    torch_empty_cache: bool = True


class UpdateFromDisk(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    is_async: bool = False
    torch_empty_cache: bool = False
    keep_pause: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0
    flush_cache: bool = True
    manifest: dict[str, Any] | None = None


class SglangNewVersion(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """SGLang's POST /update_weight_version"""

    new_version: str
    abort_all_requests: bool = True


class InitGroup(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class DestroyGroup(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    group_name: str = "weight_update_group"


class UpdateFromDistributed(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: str | None = None
    selector: Literal["target", "draft", "all"] = "all"


class UpdateFromTensor(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    serialized_named_tensors: list[str]
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    selector: Literal["target", "draft", "all"] = "all"


class UpdateFromIpc(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    zmq_handles: dict[str, str]
    flush_cache: bool = True
    weight_version: str | None = None


class BeginUpdate(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """SGLang's POST /begin_weight_update; /end_weight_update has no field"""

    selector: Literal["target", "draft", "all"] = "all"


class WeightsChecker(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    action: str = "checksum"
    allow_quant_error: bool = False
    skip_tensor_list: list[str] | None = None
    selector: Literal["target", "draft", "all"] = "all"


class WeightsByName(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    name: str
    truncate_size: int = 100


class Occupation(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    tags: list[str] | None = None


class SglangAbort(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    rid: str | None = None
    abort_all: bool = False
