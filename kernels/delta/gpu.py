"""Diff-and-compact and apply on the device that holds the weights: CuPy twins of `gap.GapEncoder.diff` and `changes.scatter`.

What leaves or reaches the device is the changed elements alone: 0.6 % of them at a learning rate of 1e-6. Coding,
checksums and digests stay with the CPU twins, which take the same arrays. CuPy is imported when a function is called;
`compile_cubin` needs neither a GPU nor its driver, only NVRTC: `cupy.RawModule` and `compile_using_nvrtc` do need one.

Legend: M elements of a tensor, K chunks, N changed elements, B tiles.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib import resources
from typing import Any, Final, NamedTuple

from rollwire.kernels.tensors import CHUNK_ELEMENTS, chunk_count
from rollwire.schemas.errors import BaseMismatch, EnvironmentMissing, StateMismatch

ARCHITECTURES: Final = ("sm_80", "sm_90a", "sm_100a")  # Ampere, Hopper, Blackwell
KERNELS: Final = tuple(
    f"{kernel}_u{8 * lane}" for lane in (1, 2, 4, 8) for kernel in ("count", "compact", "check", "scatter")
)
_OPTIONS: Final = ("-std=c++17",)
_TILE: Final = 2048  # TILE of changes.cu
_THREADS: Final = 256
_TILES_A_BLOCK: Final = _THREADS // 32


class DeviceChanges(NamedTuple):
    """As `prepare.Changes`, in the device's memory; chunk k of the tensor has [at_K[k], at_K[k + 1]) of N."""

    at_K: Any  # u64 [K + 1]
    positions_N: Any  # u32, in the chunk, ascending in each chunk
    old_N: Any  # lanes
    new_N: Any


def source() -> str:
    """The CUDA source of all kernels."""
    return (resources.files("rollwire.kernels.delta.cuda") / "changes.cu").read_text()


def compile_cubin(architecture: str) -> bytes:
    """The kernels as a CUBIN for an architecture of `ARCHITECTURES`, by NVRTC, on any machine.

    Raises `EnvironmentMissing` without CuPy or NVRTC, or where the source does not compile for it (with NVRTC's log).
    """
    nvrtc = _module("cupy_backends.cuda.libs.nvrtc")
    program = nvrtc.createProgram(source(), "changes.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"--gpu-architecture={architecture}", *_OPTIONS))
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise EnvironmentMissing(f"changes.cu does not compile for {architecture}: {error}\n{log}") from error
    finally:
        nvrtc.destroyProgram(program)


def diff_compact(old_M: Any, new_M: Any) -> DeviceChanges:
    """What differs between two device arrays: the flat unsigned lanes of one whole tensor, contiguous.

    The same arrays, in the same order, as the CPU twin gives chunk by chunk. Raises `StateMismatch` for arrays that do
    not fit each other.
    """
    cupy = _module("cupy")
    if not (
        old_M.ndim == 1
        and (old_M.shape, old_M.dtype) == (new_M.shape, new_M.dtype)
        and old_M.dtype.kind == "u"
        and old_M.flags.c_contiguous
        and new_M.flags.c_contiguous
    ):
        raise StateMismatch(
            f"needed are two flat contiguous arrays of equal unsigned lanes; given are {old_M.dtype}{list(old_M.shape)} "
            f"and {new_M.dtype}{list(new_M.shape)}"
        )
    lane, elements = 8 * old_M.dtype.itemsize, old_M.size
    tiles = -(-elements // _TILE)
    count_B = cupy.zeros(tiles, cupy.uint32)
    ends_B = cupy.zeros(tiles + 1, cupy.uint64)
    grid = (-(-tiles // _TILES_A_BLOCK),)
    sizes = (cupy.uint64(elements), cupy.uint64(tiles))
    if tiles:
        _kernel(f"count_u{lane}")(grid, (_THREADS,), (old_M, new_M, *sizes, count_B))
        cupy.cumsum(count_B, dtype=cupy.uint64, out=ends_B[1:])
    total = int(ends_B[-1])
    positions_N = cupy.empty(total, cupy.uint32)
    old_N, new_N = cupy.empty(total, old_M.dtype), cupy.empty(total, old_M.dtype)
    if total:
        _kernel(f"compact_u{lane}")(
            grid, (_THREADS,), (old_M, new_M, *sizes, ends_B, positions_N, old_N, new_N)
        )
    chunks = cupy.arange(chunk_count(elements) + 1) * (CHUNK_ELEMENTS // _TILE)
    return DeviceChanges(ends_B[cupy.minimum(chunks, tiles)], positions_N, old_N, new_N)


def apply_changes(target_M: Any, changes: DeviceChanges, *, undo: bool = False) -> None:
    """Writes the changes into the flat lanes of a tensor, in place; `undo` writes the old elements back.

    Raises `BaseMismatch` before the first byte where an element is not the one that its change starts from.
    """
    cupy = _module("cupy")
    expected_N, values_N = (changes.new_N, changes.old_N) if undo else (changes.old_N, changes.new_N)
    chunks = changes.at_K.size - 1
    if target_M.dtype != values_N.dtype or chunks != chunk_count(target_M.size):
        raise StateMismatch(
            f"changes of {values_N.dtype} in {chunks} chunks do not fit {target_M.dtype}{list(target_M.shape)}"
        )
    if not chunks or not values_N.size:
        return
    lane = 8 * target_M.dtype.itemsize
    wrong = cupy.zeros(1, cupy.uint32)
    _kernel(f"check_u{lane}")(
        (chunks,),
        (_THREADS,),
        (target_M, cupy.uint64(target_M.size), changes.at_K, changes.positions_N, expected_N, wrong),
    )
    if int(wrong[0]):
        raise BaseMismatch(
            f"{int(wrong[0])} of {values_N.size} changed elements on the device are not those of the delta's base: "
            "load the version that it is for, or an anchor"
        )
    _kernel(f"scatter_u{lane}")(
        (chunks,), (_THREADS,), (target_M, changes.at_K, changes.positions_N, values_N)
    )


@cache
def _compiled() -> Any:
    return _module("cupy").RawModule(code=source(), options=_OPTIONS)


@cache
def _kernel(name: str) -> Any:
    return _compiled().get_function(name)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise EnvironmentMissing(
            f"{name} cannot be imported ({error}): install rollwire[gpu], on a machine with an NVIDIA GPU to run kernels"
        ) from error
