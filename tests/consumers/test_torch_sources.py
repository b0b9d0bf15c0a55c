"""Torch tensors as sources of a publisher's copy: any layout, any element type, the bits that a whole copy gives."""

from __future__ import annotations

import pytest
import torch

from rollwire.consumers.torch_states import module_sources, module_state, torch_source
from rollwire.consumers.weights.buffers import BufferPool
from rollwire.consumers.weights.publisher import PublisherConfig, SnapshotPublisher
from rollwire.consumers.weights.sources import sources_of
from rollwire.kernels.digest import StateDigest
from rollwire.schemas.errors import StateMismatch
from rollwire.streams.seams.store_memory import MemoryStore

pytestmark = pytest.mark.torch
WAIT = 60.0


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = torch.nn.Embedding(11, 6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.BatchNorm1d(6)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def test_a_module_is_published_as_a_whole_copy_would_be() -> None:
    module = Tied()
    publisher = SnapshotPublisher(MemoryStore(), model="m", lineage="L", config=PublisherConfig())
    try:
        for version in range(3):
            wanted = StateDigest.of(module_state(module)).hex
            future = publisher.publish(version, module_sources(module))
            with torch.no_grad():  # the trainer goes on at once
                module.embed.weight.mul_(1.01)
                module.get_buffer("norm.num_batches_tracked").add_(1)
            assert future.result(WAIT).state_digest == wanted
            publisher.committed(version)
    finally:
        publisher.close(WAIT)
    assert set(module_sources(module)) == set(module_state(module))


@pytest.mark.parametrize(
    ("dtype", "tag"),
    [
        (torch.bfloat16, "BF16"),
        (torch.float16, "F16"),
        (torch.float32, "F32"),
        (torch.float64, "F64"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.float8_e5m2, "F8_E5M2"),
        (torch.float8_e8m0fnu, "F8_E8M0"),
        (torch.bool, "BOOL"),
        (torch.uint8, "U8"),
        (torch.int8, "I8"),
        (torch.int16, "I16"),
        (torch.uint16, "U16"),
        (torch.int32, "I32"),
        (torch.uint32, "U32"),
        (torch.int64, "I64"),
        (torch.uint64, "U64"),
    ],
)
def test_every_bit_is_kept_in_any_layout(dtype: torch.dtype, tag: str) -> None:
    """NaN payloads, -0.0 and strides included."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.arange(12 * 10 * size, dtype=torch.int64).mul(37).to(torch.uint8)
    if dtype == torch.bool:
        raw = raw % 2
    value = raw.view(dtype).view(12, 10)
    for view in (value, value.t(), value[:, 3:7], value[::2]):
        state = BufferPool(1).fill(sources_of({"w": view}))
        assert (state["w"].dtype, state["w"].shape) == (tag, tuple(view.shape))
        assert state["w"].bits.tobytes() == view.contiguous().view(torch.uint8).numpy().tobytes()


def test_only_small_floats_are_rounded() -> None:
    value = torch.tensor([1.0 + 2**-9, -0.0, float("nan")])
    assert torch_source("w", value, "BF16").dtype == "BF16"
    assert torch_source("w", value).dtype == "F32"
    assert torch_source("w", value.double(), "BF16").dtype == "F64"
    assert torch_source("w", torch.zeros(2, dtype=torch.int32), "BF16").dtype == "I32"
    state = BufferPool(1).fill({"w": torch_source("w", value, "BF16")})
    assert state["w"].bits[:2].tolist() == [0x3F80, 0x8000]


def test_an_element_type_without_a_tag_is_refused() -> None:
    with pytest.raises(StateMismatch, match=r"w is torch\.complex64"):
        torch_source("w", torch.zeros(2, dtype=torch.complex64))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_copied_into_page_locked_memory() -> None:
    module = Tied().cuda()
    sources = module_sources(module)
    pool = BufferPool(2)
    state = pool.fill(sources)
    assert StateDigest.of(state).hex == StateDigest.of(module_state(module)).hex
    memory = torch.from_numpy(state["embed.weight"].bits.view("int16"))
    assert memory.is_pinned()
