"""The Merkle tree of an epoch, in the shape of RFC 6962, section 2.1: roots, audit paths and their check. Pure.

Its leaves are the epoch's segments in the order of (topic, partition, first). Leaves and nodes are hashed with different
prefixes, so a node is never taken for a leaf.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollwire.streams.archive.leaves import empty_root, tree_leaf, tree_node


def root_of(leaves: Sequence[bytes]) -> bytes:
    """`leaves`: as `leaves.tree_leaf` gives them."""
    level = list(leaves)
    if not level:
        return empty_root()
    # Pairing from the left, with an odd one carried up, gives the RFC's split at the largest power of two.
    while len(level) > 1:
        level = _above(level)
    return level[0]


def path_of(leaves: Sequence[bytes], index: int) -> tuple[bytes, ...]:
    """The audit path of leaf `index`, from its sibling up. Raises `IndexError` where there is no such leaf."""
    if not 0 <= index < len(leaves):
        raise IndexError(f"there is no leaf {index} among {len(leaves)}")
    level = list(leaves)
    path: list[bytes] = []
    while len(level) > 1:
        sibling = index ^ 1
        if sibling < len(level):
            path.append(level[sibling])
        level = _above(level)
        index //= 2
    return tuple(path)


def root_from(digest: bytes, chain: bytes, index: int, size: int, path: Sequence[bytes]) -> bytes | None:
    """The root that the path of a segment leads to; None where a tree of `size` leaves has no such path.

    The segment is hashed here, so that no node can be passed for one (RFC 9162, 2.1.3.2).
    """
    if not 0 <= index < size:
        return None
    node, last, left = tree_leaf(digest, chain), size - 1, list(reversed(path))
    while last > 0:
        if index % 2 == 1 or index < last:
            if not left:
                return None
            sibling = left.pop()
            node = tree_node(sibling, node) if index % 2 == 1 else tree_node(node, sibling)
        index, last = index // 2, last // 2
    return None if left else node


def _above(level: list[bytes]) -> list[bytes]:
    above = [tree_node(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
    if len(level) % 2:
        above.append(level[-1])
    return above
