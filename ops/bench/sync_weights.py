"""The weights of `rollwire bench sync` and `bench replay`: bf16 tensors of one Llama-like geometry that move as real training
moves them.

A tile of masters takes AdamW steps at a learning rate of 1e-5, or another, on independent gradients; its bf16 casts are laid end to end
through the tensors. The standard deviation of the masters is chosen so that as many elements change a step as in real
fine-tuning at that rate (4.1 % in steps 15 to 20).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.tensors import State, Tensor
from rollwire.ops.bench.delta import to_bf16

RATE: Final = 1e-5
_DEVIATION: Final = 0.035
_TILE: Final = 3_999_971  # elements; a prime, so that no two rows and no two chunks begin alike
_HIDDEN, _KEYS, _WIDE = 2_048, 512, 5_632
_LAYER: Final = (
    ("self_attn.q_proj", (_HIDDEN, _HIDDEN)),
    ("self_attn.k_proj", (_KEYS, _HIDDEN)),
    ("self_attn.v_proj", (_KEYS, _HIDDEN)),
    ("self_attn.o_proj", (_HIDDEN, _HIDDEN)),
    ("mlp.gate_proj", (_WIDE, _HIDDEN)),
    ("mlp.up_proj", (_WIDE, _HIDDEN)),
    ("mlp.down_proj", (_HIDDEN, _WIDE)),
)


def shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """Layers of `_LAYER` until `nbytes` are full; the last tensor has fewer rows."""
    left = nbytes // 2
    found: dict[str, tuple[int, ...]] = {}
    layer = 0
    while left > 0:
        for name, (rows, columns) in _LAYER:
            rows = min(rows, -(-left // columns))
            if left <= 0:
                break
            found[f"model.layers.{layer}.{name}.weight"] = (rows, columns)
            left -= rows * columns
        layer += 1
    return found


class MovingWeights:
    """`state` is what the trainer holds and changes in place."""

    def __init__(self, nbytes: int, seed: int = 0, *, rate: float = RATE) -> None:
        self._tiles = _tiles(seed, rate)
        self._flat_N = np.zeros(sum(a * b for a, b in shapes(nbytes).values()), np.uint16)
        self.state: State = {}
        at = 0
        made: dict[str, Tensor] = {}
        for name, shape in shapes(nbytes).items():
            size = int(np.prod(shape))
            made[name] = Tensor("BF16", shape, self._flat_N[at : at + size])
            at += size
        self.state = made
        self.step()

    @property
    def flat(self) -> NDArray[np.uint8]:
        """All of it as bytes, end to end."""
        return self._flat_N.view(np.uint8)

    @property
    def nbytes(self) -> int:
        return int(self._flat_N.nbytes)

    def step(self) -> None:
        """One step of the optimiser, as far as the published bits show it."""
        tile_T = next(self._tiles)
        for start in range(0, self._flat_N.size, tile_T.size):
            part = self._flat_N[start : start + tile_T.size]
            part[:] = tile_T[: part.size]


def _tiles(seed: int, rate: float) -> Iterator[NDArray[np.uint16]]:
    rng = np.random.default_rng(seed)
    w_T = rng.standard_normal(_TILE, dtype=np.float32) * np.float32(_DEVIATION)
    m_T: NDArray[Any] = np.zeros_like(w_T)
    v_T: NDArray[Any] = np.zeros_like(w_T)
    step = 0
    while True:
        step += 1
        g_T = rng.standard_normal(_TILE, dtype=np.float32)
        m_T = np.float32(0.9) * m_T + np.float32(0.1) * g_T
        v_T = np.float32(0.999) * v_T + np.float32(0.001) * g_T * g_T
        update_T = (m_T / np.float32(1 - 0.9**step)) / (
            np.sqrt(v_T / np.float32(1 - 0.999**step)) + np.float32(1e-8)
        )
        w_T = w_T - np.float32(rate) * update_T
        if step > 10:  # the first steps of Adam are dense
            yield to_bf16(w_T.astype(np.float32, copy=False))
