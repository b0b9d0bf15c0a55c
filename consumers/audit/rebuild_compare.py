"""Where two states differ, tensor by tensor: what a rebuild names when its digest is not the published one. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from rollwire.kernels.tensors import State, Tensor

_FLOATS: Final = frozenset({"F8_E4M3", "F8_E5M2", "F16", "BF16", "F32", "F64"})


class Difference(NamedTuple):
    """The first tensor, by name, that differs."""

    tensor: str
    tensors: int  # that differ in all
    detail: str  # of the first one: which elements, by how much

    def __str__(self) -> str:
        more = f"; {self.tensors - 1} more tensors differ" if self.tensors > 1 else ""
        return f"tensor {self.tensor}: {self.detail}{more}"


def first_difference(published: State, rebuilt: State) -> Difference | None:
    """None: the two are equal bit for bit (law 5)."""
    differing = [
        (name, detail)
        for name in sorted(published.keys() | rebuilt.keys())
        if (detail := _differ(published.get(name), rebuilt.get(name)))
    ]
    if not differing:
        return None
    return Difference(differing[0][0], len(differing), differing[0][1])


def _differ(a: Tensor | None, b: Tensor | None) -> str:
    """Empty: they are equal."""
    if a is None or b is None:
        return "only published" if b is None else "only rebuilt"
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype}{list(a.shape)} published, {b.dtype}{list(b.shape)} rebuilt"
    changed_N = np.flatnonzero(a.bits != b.bits)
    if not changed_N.size:
        return ""
    at = int(changed_N[0])
    width = 2 * a.bits.dtype.itemsize
    said = (
        f"{changed_N.size:,} of {a.elements:,} elements, first element {at}: {int(a.bits[at]):#0{width + 2}x} published, "
        f"{int(b.bits[at]):#0{width + 2}x} rebuilt"
    )
    if a.dtype in _FLOATS:
        pairs = zip(a.bits[changed_N].tolist(), b.bits[changed_N].tolist(), strict=True)
        bits = 8 * a.bits.dtype.itemsize
        apart = max(abs(_ordered(x, bits) - _ordered(y, bits)) for x, y in pairs)
        said += f", at most {apart:,} ULP apart"
    return said


def _ordered(bits: int, width: int) -> int:
    """The bit pattern of a float as an integer that ascends as its value does."""
    sign = 1 << (width - 1)
    return sign - bits if bits & sign else bits
