"""What an account keeps of each record: 20 to 28 bytes, so that many millions fit into memory. Pure.

Identities are kept as their hashes of 64 bits, which differ from process to process: nobody can make two that meet. Among ten
million events, one that was lost is taken for one that is there with a chance of 1 in 10^12.

Legend: N records of a column, M known values.
"""

from __future__ import annotations

from array import array
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

OFFSET_BITS: Final = 48
UNNAMED: Final = 0
"""The key of a record without an identity, or that does not decode: the hash of an empty string."""


def packed(partition: int, offset: int) -> int:
    """A place within a topic as one number; in order of partition, then offset."""
    return partition << OFFSET_BITS | offset


def unpacked(place: int) -> tuple[int, int]:
    """Partition and offset."""
    return place >> OFFSET_BITS, place & ((1 << OFFSET_BITS) - 1)


class Column:
    """Some records of a topic, in the order in which they were added."""

    __slots__ = ("groups", "hours", "keys", "places")

    def __init__(self) -> None:
        self.places = array("q")
        self.hours = array("i")
        self.keys = array("q")
        self.groups = array("q")  # empty where nobody asks for them

    def add(self, place: int, hour: int, key: int) -> None:
        self.places.append(place)
        self.hours.append(hour)
        self.keys.append(key)


class Marks:
    """Identities that events name, each with the hour of the event that named it."""

    __slots__ = ("hours", "keys")

    def __init__(self) -> None:
        self.keys = array("q")
        self.hours = array("i")

    def add(self, key: int, hour: int) -> None:
        self.keys.append(key)
        self.hours.append(hour)


def ints(values: array[int]) -> Ints:
    return np.asarray(values).astype(np.int64, copy=False)


def sorted_once(*values_of: Any) -> Ints:
    """All values of several arrays, ascending, each once."""
    if not values_of:
        return np.empty(0, np.int64)
    return np.unique(np.concatenate([np.asarray(values, np.int64) for values in values_of]))


def among(values_N: Ints, known_M: Ints) -> Mask:
    """Which values are known. `known_M`: ascending."""
    if not len(known_M):
        return np.zeros(len(values_N), np.bool_)
    at_N = np.searchsorted(known_M, values_N)
    at_N[at_N == len(known_M)] = 0
    found: Mask = known_M[at_N] == values_N
    return found


class First:
    """The first hour of each key."""

    __slots__ = ("hours", "keys")

    def __init__(self, keys_N: Ints, hours_N: Ints) -> None:
        order_N = np.lexsort((hours_N, keys_N))
        self.keys, first_M = np.unique(keys_N[order_N], return_index=True)
        self.hours = hours_N[order_N][first_M]

    def of(self, keys_N: Ints) -> Ints:
        """The hours of keys that are all known."""
        return self.hours[np.searchsorted(self.keys, keys_N)]


def first_of(*marks: Marks) -> First:
    """Over several; a key that stands in more than one has its earliest hour."""
    return First(
        np.concatenate([ints(one.keys) for one in marks]), np.concatenate([ints(one.hours) for one in marks])
    )
