"""Small states of several dtypes, and steps between them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import pytest

from rollwire.kernels.tensors import State, Tensor, tensor


class MakeState(Protocol):
    def __call__(self, seed: int = 0) -> State: ...


class Move(Protocol):
    def __call__(self, state: State, seed: int, density: float = 0.05) -> State: ...


@pytest.fixture(scope="session")
def make_state() -> MakeState:
    def make(seed: int = 0) -> State:
        rng = np.random.default_rng(seed)
        gaussian = (rng.standard_normal(6_000, dtype=np.float32) * 0.02).view(np.uint32) >> 16
        return {
            "layers.0.weight": tensor("BF16", (60, 100), gaussian.astype(np.uint16)),
            "layers.1.weight": tensor("F32", (50, 4), rng.standard_normal(200, dtype=np.float32)),
            "scale": tensor("F8_E8M0", (7,), rng.integers(0, 256, 7, dtype=np.uint8)),
            "step": tensor("I64", (), (seed).to_bytes(8, "little")),
            "empty": tensor("F16", (0, 4), b""),
        }

    return make


@pytest.fixture(scope="session")
def move() -> Move:
    def moved(state: State, seed: int, density: float = 0.05) -> State:
        rng = np.random.default_rng([seed, 1])
        return {
            name: Tensor(t.dtype, t.shape, t.bits ^ (rng.random(t.bits.size) < density).astype(t.bits.dtype))
            for name, t in state.items()
        }

    return moved
