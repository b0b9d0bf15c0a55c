"""The difference of two states as a change in place: for arrays that serve, whatever way their next version came by.

Compared and gathered beforehand, so that the swap only writes: changed elements one by one, or a stretch whole where most
of it changed. Names: N changed elements.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.tensors import State
from rollwire.schemas.errors import StateMismatch, TargetFailed

_DENSE: Final = (
    0.25  # of the elements: above it copying all is quicker than scattering, and smaller than positions
)


class _Piece(NamedTuple):
    name: str
    bits: NDArray[Any]  # what is served
    positions_N: NDArray[Any] | None  # None = all
    old_N: NDArray[Any]
    new_N: NDArray[Any]

    def put(self, values_N: NDArray[Any]) -> None:
        if self.positions_N is None:
            np.copyto(self.bits, values_N)
        else:
            self.bits[self.positions_N] = values_N


class Scatter:
    """A `Change` of `held` to the bits of `new`. Neither is kept longer than this is, and `new` is not written to."""

    def __init__(self, held: State, new: State) -> None:
        """Raises `StateMismatch` for another layout, `TargetFailed` for arrays that can't be written to."""
        check_layout(held, new)
        check_writable(held)
        self._pieces: list[_Piece] = []
        for name, mine in held.items():
            bits, wanted = mine.bits, new[name].bits
            if bits is wanted or bits.size == 0:
                continue
            positions_N = np.flatnonzero(bits != wanted)
            if positions_N.size > _DENSE * bits.size:
                self._pieces.append(_Piece(name, bits, None, bits.copy(), wanted))
            elif positions_N.size:
                if bits.size < 1 << 32:
                    positions_N = positions_N.astype(np.uint32)
                self._pieces.append(_Piece(name, bits, positions_N, bits[positions_N], wanted[positions_N]))

    @property
    def changed(self) -> int:
        """Elements that are written."""
        return sum(piece.new_N.size for piece in self._pieces)

    @property
    def names(self) -> frozenset[str]:
        """The tensors that change."""
        return frozenset(piece.name for piece in self._pieces)

    def apply(self) -> None:
        for piece in self._pieces:
            piece.put(piece.new_N)

    def undo(self) -> None:
        for piece in self._pieces:
            piece.put(piece.old_N)


def check_layout(held: State, new: State) -> None:
    """Names, dtypes, shapes and parts are the same. Raises `StateMismatch` that names the tensor (C27)."""

    def layout(state: State) -> dict[str, tuple[object, ...]]:
        return {name: (t.dtype, tuple(t.shape), t.start, t.bits.size) for name, t in state.items()}

    mine, others = layout(held), layout(new)
    if mine == others:
        return
    differing = sorted(name for name in mine.keys() | others.keys() if mine.get(name) != others.get(name))
    name = differing[0]
    raise StateMismatch(
        f"{len(differing)} tensors differ between what serves and the version, first {name!r}: "
        f"serves {mine.get(name, 'none')}, published is {others.get(name, 'none')}"
    )


def check_writable(held: State) -> None:
    """Raises `TargetFailed` that names the first tensor whose memory can't be changed in place."""
    for name, one in held.items():
        if not (one.bits.flags.writeable and one.bits.flags.c_contiguous):
            raise TargetFailed(
                f"the array of {name!r} is read-only or not contiguous: it can't be served from"
            )
