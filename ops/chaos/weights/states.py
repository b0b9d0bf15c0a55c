"""The weights of the matrix: small, of several types, and each version follows from its number, as a replayed step would."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np

from rollwire.consumers.weights.publisher import PublisherConfig
from rollwire.consumers.weights.slices import Slice
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import CHUNK_ELEMENTS, State, Tensor, tensor

LAST: Final = 4
"""Versions 0 to LAST: an anchor, a delta, a delta with an anchor beside it, one that changes nothing, a delta; and LAST is a
skip of four versions away from the first."""

EMPTY: Final = 3  # the version that changes nothing
_WIDE: Final = 2 * CHUNK_ELEMENTS + 1_000  # three chunks, so that a delta has several shards
_DENSITY: Final = 0.002
SLICE: Final = {"layers.0.*": Slice(1, 2)}
"""What a replica of a slice holds: of the largest tensor the last two chunks of three."""

PUBLISHER: Final = PublisherConfig(
    anchor_every=2, shard_bytes=1, puts=1, anchor_shard_bytes=CHUNK_ELEMENTS, submit_timeout_s=60.0
)


@lru_cache(maxsize=LAST + 2)
def state_of(version: int) -> State:
    """The weights of a version. Their arrays cannot be written to."""
    if version == 0:
        rng = np.random.default_rng(0)
        exponents = rng.integers(0x3000, 0x3E00, 3_000, dtype=np.uint16)
        made: State = {
            "layers.0.weight": tensor("U8", (_WIDE,), rng.integers(0, 256, _WIDE, dtype=np.uint8)),
            "layers.1.weight": tensor("BF16", (30, 100), exponents),
            "norm.weight": tensor("F32", (16,), np.ones(16, np.float32)),
            "scale": tensor("F8_E8M0", (3,), rng.integers(0, 256, 3, dtype=np.uint8)),
            "steps": tensor("I64", (), np.zeros(1, np.int64)),
            "unused": tensor("F16", (0, 4), b""),
        }
    elif version == EMPTY:
        return state_of(version - 1)
    else:
        made = {name: _moved(t, version) for name, t in state_of(version - 1).items()}
    for t in made.values():
        t.bits.flags.writeable = False
    return made


def model_of(lineage: str) -> str:
    """A model for each lineage: its objects are its own, so that each put of a cell is the first one."""
    return f"chaos/{lineage}"


@lru_cache(maxsize=LAST + 2)
def digest_of(version: int) -> str:
    return StateDigest.of(state_of(version)).hex


def same_bits(held: State, whole: State, *, parts: bool = False) -> bool:
    """Names, types, shapes and every bit. `parts`: parts of tensors are held, and of these every bit."""
    return held.keys() == whole.keys() and all(
        (t.dtype, t.shape) == (whole[name].dtype, whole[name].shape)
        and (parts or t.bits.size == whole[name].bits.size)
        and np.array_equal(t.bits, whole[name].bits[t.start : t.start + t.bits.size])
        for name, t in held.items()
    )


def _moved(t: Tensor, version: int) -> Tensor:
    rng = np.random.default_rng([version, t.bits.size])
    flips = (rng.random(t.bits.size) < max(_DENSITY, 1 / max(t.bits.size, 1))).astype(t.bits.dtype)
    return Tensor(t.dtype, t.shape, t.bits ^ flips)
