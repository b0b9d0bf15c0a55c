"""Anchors: every dtype comes back bit for bit; transformers opens them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollwire.consumers.weights.anchor import CONFIG_FILE, INDEX_FILE, AnchorFile, read_anchor, write_anchor
from rollwire.kernels.tensors import LANE_BYTES, State, Tensor, tensor
from rollwire.schemas.errors import DeltaCorrupt, StateMismatch


def every_dtype() -> State:
    rng = np.random.default_rng(0)
    state = {
        dtype: tensor(dtype, (3, 5), rng.integers(0, 256, 15 * lane, dtype=np.uint8).tobytes())
        for dtype, lane in LANE_BYTES.items()
        if dtype != "BOOL"
    }
    state["BOOL"] = tensor("BOOL", (3, 5), (np.arange(15) % 2).astype(np.uint8))
    return state | {"scalar": tensor("F32", (), bytes(4)), "empty": tensor("BF16", (0, 4), b"")}


def same(a: State, b: State) -> bool:
    return {n: (t.dtype, t.shape, t.bits.tobytes()) for n, t in a.items()} == {
        n: (t.dtype, t.shape, t.bits.tobytes()) for n, t in b.items()
    }


@pytest.mark.parametrize("shard_bytes", [64, 1 << 20])
def test_every_dtype_comes_back(shard_bytes: int) -> None:
    state = every_dtype()
    files = write_anchor(state, shard_bytes=shard_bytes)
    assert same(read_anchor(files), state)
    names = [file for file, _ in files]
    if shard_bytes == 64:
        assert len(names) > 3
        index = json.loads(dict(files)[INDEX_FILE])
        assert set(index["weight_map"]) == set(state)
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in state.values())
    else:
        assert names == ["model.safetensors"]


def test_bytes_do_not_depend_on_the_order_of_names() -> None:
    state = every_dtype()
    turned = dict(reversed(list(state.items())))
    assert write_anchor(state, shard_bytes=200) == write_anchor(turned, shard_bytes=200)


def test_unknown_dtype_and_damage_are_refused() -> None:
    with pytest.raises(StateMismatch, match="F4_E9M9"):
        write_anchor({"w": Tensor("F4_E9M9", (1,), np.zeros(1, np.uint8))}, shard_bytes=1 << 20)
    (file, data) = write_anchor(every_dtype(), shard_bytes=1 << 20)[0]
    with pytest.raises(DeltaCorrupt, match=r"model\.safetensors"):
        read_anchor([AnchorFile(file, data[:-1])])
    with pytest.raises(StateMismatch, match="two shards"):
        read_anchor([AnchorFile(file, data), AnchorFile(file, data)])


@pytest.mark.torch
def test_transformers_opens_an_anchor_and_ours_reads_theirs(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        vocab_size=20,
        decoder_sparse_step=1,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval()
    theirs = tmp_path / "theirs"
    model.save_pretrained(theirs)
    state = read_anchor(
        [AnchorFile(path.name, path.read_bytes()) for path in sorted(theirs.glob("*.safetensors"))]
    )

    ours = tmp_path / "ours"
    ours.mkdir()
    hf_config: dict[str, Any] = json.loads((theirs / CONFIG_FILE).read_text())
    files = write_anchor(state, shard_bytes=20_000, hf_config=hf_config)
    assert len(files) > 3
    for file, data in files:
        (ours / file).write_bytes(data)
    opened, info = transformers.Qwen3MoeForCausalLM.from_pretrained(
        ours, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    reference = model.state_dict()
    assert opened.state_dict().keys() == reference.keys()
    for name, parameter in opened.state_dict().items():
        assert torch.equal(parameter, reference[name]), name
    tokens = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        reopened = transformers.Qwen3MoeForCausalLM.from_pretrained(theirs, dtype=torch.bfloat16)
        assert torch.equal(opened.eval()(tokens).logits, reopened.eval()(tokens).logits)
