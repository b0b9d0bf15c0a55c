"""Every place where a process of the simulation may die: the calls that each role makes, before and after."""

from __future__ import annotations

from typing import Final

from rollwire.ops.simulate.world import Point, Side

_TRANSACTION: Final = ("init_transactions", "write_transactional", "send_offsets", "end_transaction")
_START: Final = ("beginning_offsets", "end_offsets", "committed", "poll")

CALLS: Final[dict[str, tuple[str, ...]]] = {
    "producer": ("write",),
    "assemble": (*_TRANSACTION, *_START),
    "pack": (*_TRANSACTION, *_START),
    "trainer": (*_TRANSACTION, *_START, "create", "get"),
    "revert": (*_TRANSACTION, *_START, "create", "get", "head"),
}
# Inside a call, where nothing comes after that could be told from the call's own end.
INNER: Final = ("await_marker", "write_rest")
_SIDES: Final[tuple[Side, ...]] = ("before", "after")

POINTS: Final[tuple[Point, ...]] = (
    *(Point(role, call, side) for role, calls in CALLS.items() for call in calls for side in _SIDES),
    *(Point(role, call, "before") for role in CALLS if role != "producer" for call in INNER),
)

# What a seed's own place to die is drawn from. A revert comes by the end of its way seldom, and waits for markers there
# more seldom still.
_RARE: Final = tuple(point for point in POINTS if point.role == "revert" and point.call in _TRANSACTION)
_RAREST: Final = tuple(point for point in POINTS if point.role == "revert" and point.call in INNER)
TARGETS: Final[tuple[Point, ...]] = (*POINTS, *(3 * _RARE), *(10 * _RAREST))
