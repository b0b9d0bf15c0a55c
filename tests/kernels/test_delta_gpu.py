"""The CUDA twins: they compile for every architecture on any machine, and agree with the CPU twins where there is a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rollwire.kernels.delta import gpu
from rollwire.kernels.delta.gap import GapEncoder
from rollwire.kernels.tensors import CHUNK_ELEMENTS
from rollwire.schemas.errors import BaseMismatch, EnvironmentMissing, StateMismatch

SIZES = (0, 1, 2047, 2049, CHUNK_ELEMENTS, 2 * CHUNK_ELEMENTS + 12_345)


@pytest.mark.parametrize("architecture", gpu.ARCHITECTURES)
def test_every_kernel_is_in_the_cubin(architecture: str) -> None:
    cubin = gpu.compile_cubin(architecture)
    assert cubin.startswith(b"\x7fELF")
    missing = [name for name in gpu.KERNELS if f".text.{name}\0".encode() not in cubin]
    assert not missing


def test_an_architecture_that_nvrtc_does_not_know_is_named() -> None:
    with pytest.raises(EnvironmentMissing, match="sm_1"):
        gpu.compile_cubin("sm_1")


def test_the_source_agrees_with_the_chunk_grid() -> None:
    assert f"#define CHUNK (1ull << {CHUNK_ELEMENTS.bit_length() - 1})" in gpu.source()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (np.zeros(4, np.uint16), np.zeros(5, np.uint16)),
        (np.zeros(4, np.uint16), np.zeros(4, np.uint32)),
        (np.zeros(4, np.float32), np.zeros(4, np.float32)),
        (np.zeros((2, 2), np.uint8), np.zeros((2, 2), np.uint8)),
        (np.zeros(8, np.uint8)[::2], np.zeros(4, np.uint8)),
    ],
)
def test_arrays_that_do_not_fit_are_refused_before_the_device(old: NDArray[Any], new: NDArray[Any]) -> None:
    with pytest.raises(StateMismatch):
        gpu.diff_compact(old, new)


def _device() -> Any:
    cupy = pytest.importorskip("cupy")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no GPU: {error}")
    if not count:
        pytest.skip("no GPU")
    return cupy


def _states(lane: int, size: int) -> tuple[NDArray[Any], NDArray[Any]]:
    rng = np.random.default_rng(size + lane)
    old = rng.integers(0, 1 << (8 * lane - 1), size, dtype=np.uint64).astype(f"<u{lane}")
    new = old.copy()
    at = np.flatnonzero(rng.random(size) < 0.02)
    new[at] ^= np.asarray(1 + at % 100, new.dtype)
    return old, new


@pytest.mark.gpu
@pytest.mark.parametrize("lane", [1, 2, 4, 8])
@pytest.mark.parametrize("size", SIZES)
def test_diff_and_apply_are_the_cpu_twins(lane: int, size: int) -> None:
    cupy = _device()
    old, new = _states(lane, size)
    changes = gpu.diff_compact(cupy.asarray(old), cupy.asarray(new))
    at = cupy.asnumpy(changes.at_K).tolist()
    encoder = GapEncoder()
    for chunk, first in enumerate(range(0, size, CHUNK_ELEMENTS)):
        wanted = encoder.diff(old[first : first + CHUNK_ELEMENTS], new[first : first + CHUNK_ELEMENTS])
        mine = slice(at[chunk], at[chunk + 1])
        for found, right in zip(changes[1:], wanted, strict=True):
            np.testing.assert_array_equal(cupy.asnumpy(found[mine]), right)
    target = cupy.asarray(old)
    gpu.apply_changes(target, changes)
    np.testing.assert_array_equal(cupy.asnumpy(target), new)
    gpu.apply_changes(target, changes, undo=True)
    np.testing.assert_array_equal(cupy.asnumpy(target), old)


@pytest.mark.gpu
def test_c23_another_base_on_the_device_is_refused_and_nothing_moves() -> None:
    cupy = _device()
    old, new = _states(2, CHUNK_ELEMENTS + 99)
    changes = gpu.diff_compact(cupy.asarray(old), cupy.asarray(new))
    other = old.copy()
    other[int(np.flatnonzero(old != new)[-1])] ^= 1
    target = cupy.asarray(other)
    with pytest.raises(BaseMismatch, match="1 of"):
        gpu.apply_changes(target, changes)
    np.testing.assert_array_equal(cupy.asnumpy(target), other)
