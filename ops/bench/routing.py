"""`rollwire bench routing`: routing traces in size and speed, and what replay does to the mismatch.

Sizes and speeds are of one core and of traces of 60 layers and 8 of 384 experts, whose router is Zipf-skewed: in each
layer the r-th most wanted expert is chosen with a weight of 1 / r, in an order of its own, eight without replacement.
A pass goes over 16 traces of 2,048 tokens, 63 MB as int32, so that no copy is served from a cache; the baseline
is a memcpy of the int32 form into memory that is there already, in the same run.

    routing.bytes_ratio                  bytes of the int32 form over ours
    routing.bytes_ratio.zstd             the same with zstd wherever it saves a byte (the default asks for a tenth)
    routing.bytes_ratio.demo             the demo policy's own traces: 3 layers, 2 of 8 experts
    routing.bits_per_id, .demo           ours
    routing.encode_ratio                 speed of encoding the int32 form over memcpy, GB/s of the int32 form
    routing.decode_ratio                 speed of decoding over memcpy, to ids of 16 bits
    routing.decode_ratio.distinct        the same with the search for experts that stand twice (data behind a claim check)
    routing.encode_ratio.zstd, routing.decode_ratio.zstd    with a zstd frame on top

`routing_mismatch` has the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from rollwire.kernels.routing.codec import Packed, check_distinct, decode_routes, encode_routes
from rollwire.ops.figures import Figure

TRACES, TOKENS, LAYERS, TOP_K, EXPERTS = 16, 2048, 60, 8, 384
DRAWN: Final = 4  # traces that are drawn; the others are copies elsewhere in memory


def zipf_routes(tokens: int, layers: int, experts: int, top_k: int, *, seed: int) -> NDArray[np.int32]:
    """[tokens, layers, top_k]: `top_k` of the experts without replacement, weights 1 / rank.

    The smallest k of exponential draws, each divided by its weight, are a weighted sample without replacement in its
    order (Efraimidis and Spirakis 2006).
    """
    rng = np.random.default_rng(seed)
    ids = np.empty((tokens, layers, top_k), np.int32)
    for layer in range(layers):
        rank_E = rng.permutation(experts).astype(np.float32) + 1
        keys = rng.standard_exponential((tokens, experts), dtype=np.float32) * rank_E
        best = np.argpartition(keys, top_k, axis=1)[:, :top_k]
        order = np.take_along_axis(keys, best, axis=1).argsort(axis=1)
        ids[:, layer] = np.take_along_axis(best, order, axis=1)
    return ids


def _fastest(work: Callable[[], None], repeats: int) -> float:
    work()
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best


def bench_codec(*, repeats: int = 20, seed: int = 0) -> list[Figure]:
    """Sizes and speeds. Each speed is of the fastest of `repeats` passes over all traces."""
    drawn = [zipf_routes(TOKENS, LAYERS, EXPERTS, TOP_K, seed=seed + index) for index in range(DRAWN)]
    traces = [drawn[index % DRAWN].copy() for index in range(TRACES)]
    copies = [np.empty_like(trace) for trace in traces]
    shape = (TOKENS, LAYERS, TOP_K)
    plain = sum(trace.nbytes for trace in traces)
    packed = [encode_routes(trace, EXPERTS) for trace in traces]
    compressor = zstandard.ZstdCompressor(level=1)

    def compressed(trace: NDArray[np.int32]) -> Packed:
        return Packed("bits+zstd", compressor.compress(encode_routes(trace, EXPERTS, zstd=False).data))

    frames = [compressed(trace) for trace in traces]
    for trace, one, frame in zip(traces, packed, frames, strict=True):
        for form in (one, frame):
            if not np.array_equal(decode_routes(form.encoding, form.data, shape, EXPERTS), trace):
                raise ValueError("a trace did not come back as it was")

    def copy() -> None:
        for target, trace in zip(copies, traces, strict=True):
            np.copyto(target, trace)

    def encode() -> None:
        for trace in traces:
            encode_routes(trace, EXPERTS)

    def encode_zstd() -> None:
        for trace in traces:
            compressed(trace)

    def decode(forms: Sequence[Packed], *, distinct: bool = False) -> None:
        for form in forms:
            ids = decode_routes(form.encoding, form.data, shape, EXPERTS)
            if distinct:
                check_distinct(ids, EXPERTS)

    speed = {
        name: plain / _fastest(work, repeats) / 1e9
        for name, work in (
            ("memcpy", copy),
            ("encode_ratio", encode),
            ("decode_ratio", lambda: decode(packed)),
            ("decode_ratio.distinct", lambda: decode(packed, distinct=True)),
            ("encode_ratio.zstd", encode_zstd),
            ("decode_ratio.zstd", lambda: decode(frames)),
        )
    }
    memcpy = speed.pop("memcpy")
    ours = sum(len(one.data) for one in packed)
    least = sum(min(len(frame.data), len(one.data)) for frame, one in zip(frames, packed, strict=True))
    ids = plain // 4
    return [
        Figure(name="routing.bytes_ratio", value=plain / ours, unit="int32 bytes / bytes"),
        Figure(name="routing.bytes_ratio.zstd", value=plain / least, unit="int32 bytes / bytes"),
        Figure(name="routing.bits_per_id", value=8 * ours / ids, unit="bit", baseline=32.0),
        *(
            Figure(name=f"routing.{name}", value=value / memcpy, unit="of memcpy's speed")
            for name, value in speed.items()
        ),
        *(
            Figure(
                name=f"routing.{name.replace('_ratio', '_speed')}", value=value, unit="GB/s", baseline=memcpy
            )
            for name, value in speed.items()
        ),
    ]


def demo_sizes(traces: Sequence[NDArray[np.int16]], experts: int) -> list[Figure]:
    """Each trace packed on its own, as the fleet does; `traces` of [rows, layers, experts a token]."""
    ids = sum(trace.size for trace in traces)
    ours = sum(len(encode_routes(trace, experts).data) for trace in traces)
    return [
        Figure(name="routing.bytes_ratio.demo", value=4 * ids / ours, unit="int32 bytes / bytes"),
        Figure(name="routing.bits_per_id.demo", value=8 * ours / ids, unit="bit", baseline=32.0),
    ]
