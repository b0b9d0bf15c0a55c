"""`rollwire bench delta`: the gap coder against XOR + zstd-1 and full zstd-1, in one run, on one core.

The state is synthetic: gaussian weights (standard deviation 0.02), fp32 masters under Adam with independent gaussian
gradients, bf16 rounded to nearest even. The delta is the last of `WARM + 1` steps, past Adam's dense first ones.

Figures, for each dtype (bf16, f32), learning rate and codec (gap, xor, full):

    delta.<dtype>.lr<rate>.changed_pct         elements that differ between the two states
    delta.<dtype>.lr<rate>.<codec>.size_pct    stored bytes against the state's bytes
    delta.<dtype>.lr<rate>.<codec>.encode_gbps bytes of the full state a second of CPU time of the thread
    delta.<dtype>.lr<rate>.<codec>.decode_gbps the same; the result is a new state, the old one stays
    delta.digest.<dtype>.gbps                  the incremental digest of a whole state

Gap's figures have XOR's as their baseline. Its encoding includes the digests of the result, its decoding the check of
both digests; the other two have none. Every round trip is compared bit for bit before it is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from rollwire.kernels.delta.apply import apply_delta
from rollwire.kernels.delta.encode import encode_delta
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import State, tensor
from rollwire.ops.figures import Figure
from rollwire.schemas.errors import DigestMismatch

RATES: Final = (1e-6, 2e-4)
WARM: Final = 5  # Adam steps before the measured one
_DEVIATION: Final = 0.02
_WIDTH: Final = 1024


class Codec(NamedTuple):
    name: str
    encode: Callable[[], int]  # runs it and gives the stored bytes
    decode: Callable[[], State]


def adam_states(rows: int, rate: float, seed: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Masters [rows, 1024] before and after the last of `WARM + 1` Adam steps."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((rows, _WIDTH), dtype=np.float32) * np.float32(_DEVIATION)
    m, v = np.zeros_like(w), np.zeros_like(w)
    before = w
    for step in range(1, WARM + 2):
        g = rng.standard_normal(w.shape, dtype=np.float32)
        m = np.float32(0.9) * m + np.float32(0.1) * g
        v = np.float32(0.999) * v + np.float32(0.001) * g * g
        update = (m / np.float32(1 - 0.9**step)) / (
            np.sqrt(v / np.float32(1 - 0.999**step)) + np.float32(1e-8)
        )
        before, w = w, w - np.float32(rate) * update
    return before, w


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bf16, ties to even; finite input."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bench_delta(*, mib: int = 32, repeats: int = 3, seed: int = 0) -> list[Figure]:
    """All figures; `mib`: size of each measured state. Raises `DigestMismatch` if any codec loses a bit."""
    figures: list[Figure] = []
    for dtype, lane in (("bf16", 2), ("f32", 4)):
        for rate in RATES:
            old_w, new_w = adam_states(max(1, (mib << 20) // (lane * _WIDTH)), rate, seed)
            if dtype == "bf16":
                old, new = _state("BF16", to_bf16(old_w)), _state("BF16", to_bf16(new_w))
            else:
                old, new = _state("F32", old_w), _state("F32", new_w)
            figures += _measure(f"delta.{dtype}.lr{rate:.0e}".replace("e-0", "e-"), old, new, repeats)
            if rate == RATES[-1]:
                figures.append(_digest(dtype, old, repeats))
    return figures


def _digest(dtype: str, state: State, repeats: int) -> Figure:
    seconds = best_cpu_s(lambda: StateDigest.of(state), repeats)
    size = sum(t.nbytes for t in state.values())
    return Figure(name=f"delta.digest.{dtype}.gbps", value=size / seconds / 1e9, unit="GB/s")


def best_cpu_s(work: Callable[[], Any], repeats: int) -> float:
    """Thread CPU seconds of the fastest of `repeats` runs: what other work on the machine disturbs least."""
    best = float("inf")
    for _ in range(repeats):
        start = time.thread_time()
        work()
        best = min(best, time.thread_time() - start)
    return max(best, 1e-9)


def _state(dtype: str, matrix: NDArray[Any]) -> State:
    """Cut into tensors of at most 4096 rows, as layers are."""
    return {
        f"layers.{i}.weight": tensor(dtype, part.shape, part)
        for i, part in enumerate(np.array_split(matrix, -(-matrix.shape[0] // 4096)))
    }


def _measure(prefix: str, old: State, new: State, repeats: int) -> list[Figure]:
    size = sum(t.nbytes for t in old.values())
    wanted = StateDigest.of(new).hex
    changed = sum(int(np.count_nonzero(old[n].bits != new[n].bits)) for n in old)
    total = sum(t.bits.size for t in old.values())
    figures = [Figure(name=f"{prefix}.changed_pct", value=100 * changed / total, unit="%")]
    measured: dict[str, tuple[float, float, float]] = {}
    for codec in (_full(new), _xor(old, new), _gap(old, new)):
        stored = codec.encode()
        if StateDigest.of(codec.decode()).hex != wanted:
            raise DigestMismatch(f"{codec.name} does not give the same bits back")
        measured[codec.name] = (
            100 * stored / size,
            size / best_cpu_s(codec.encode, repeats) / 1e9,
            size / best_cpu_s(codec.decode, repeats) / 1e9,
        )
    for name, values in measured.items():
        kinds = (("size_pct", "%"), ("encode_gbps", "GB/s"), ("decode_gbps", "GB/s"))
        for (kind, unit), value, baseline in zip(kinds, values, measured["xor"], strict=True):
            figures.append(
                Figure(
                    name=f"{prefix}.{name}.{kind}",
                    value=value,
                    unit=unit,
                    baseline=baseline if name == "gap" else None,
                )
            )
    return figures


def _gap(old: State, new: State) -> Codec:
    digest = StateDigest.of(old)
    shards: list[bytes] = []

    def encode() -> int:
        shards[:] = encode_delta(old, new, base=digest).shards
        return sum(len(shard) for shard in shards)

    return Codec("gap", encode, lambda: apply_delta(old, shards, digest=digest).state)


def _xor(old: State, new: State) -> Codec:
    compress = zstandard.ZstdCompressor(level=1).compress
    decompress = zstandard.ZstdDecompressor().decompress
    stored: dict[str, bytes] = {}

    def encode() -> int:
        stored.update({n: compress((old[n].bits ^ new[n].bits).data) for n in old})
        return sum(len(frame) for frame in stored.values())

    def decode() -> State:
        return {
            n: t._replace(bits=t.bits ^ np.frombuffer(decompress(stored[n]), t.bits.dtype))
            for n, t in old.items()
        }

    return Codec("xor", encode, decode)


def _full(new: State) -> Codec:
    compress = zstandard.ZstdCompressor(level=1).compress
    decompress = zstandard.ZstdDecompressor().decompress
    stored: dict[str, bytes] = {}

    def encode() -> int:
        stored.update({n: compress(t.bits.data) for n, t in new.items()})
        return sum(len(frame) for frame in stored.values())

    def decode() -> State:
        return {
            n: t._replace(bits=np.frombuffer(decompress(stored[n]), t.bits.dtype)) for n, t in new.items()
        }

    return Codec("full", encode, decode)
