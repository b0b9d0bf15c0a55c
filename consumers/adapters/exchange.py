"""Messages between the ranks of a trainer, over a gloo group: bytes to all, and elements of tensors to those who need them.

Every call is made by all ranks of the group, in the same order, each from one thread; who is silent for longer than the
group's time-out is lost (law 8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from rollwire.consumers.adapters.halo import Move
from rollwire.schemas.errors import RankLost

Bytes = NDArray[np.uint8]
Read = Callable[[str, int, int], Bytes]  # name, start, end -> the elements' bytes
Write = Callable[[str, int, int, Bytes], None]
Size = Callable[[str], int]  # bytes of one element


class Ranks:
    """All ranks of the default process group, on a group of their own: no other traffic comes between."""

    def __init__(self, timeout_s: float) -> None:
        made = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        if not isinstance(made, dist.ProcessGroup):
            raise RankLost("this process is no rank of the trainer")
        self._group = made
        self.rank = dist.get_rank()
        self.count = dist.get_world_size()

    def gather(self, mine: bytes) -> list[bytes]:
        """Everyone's bytes, by rank. Raises `RankLost`."""
        with _lost():
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
            dist.all_gather(sizes, torch.tensor([len(mine)]), group=self._group)
            longest = max(int(size) for size in sizes)
            padded = torch.zeros(max(longest, 1), dtype=torch.uint8)
            padded[: len(mine)] = torch.frombuffer(bytearray(mine or b"\0"), dtype=torch.uint8)[: len(mine)]
            parts = [torch.empty_like(padded) for _ in range(self.count)]
            dist.all_gather(parts, padded, group=self._group)
        return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    def tell(self, mine: bytes | None) -> bytes:
        """What rank 0 gave. Raises `RankLost`."""
        with _lost():
            size = torch.tensor([len(mine or b"")])
            dist.broadcast(size, 0, group=self._group)
            data = torch.zeros(max(int(size), 1), dtype=torch.uint8)
            if mine:
                data = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            dist.broadcast(data, 0, group=self._group)
        return data[: int(size)].numpy().tobytes()

    def exchange(self, todo: Sequence[Move], size: Size, read: Read, write: Write) -> None:
        """Carries out `todo`, one message between any two ranks. Raises `RankLost`."""
        mine = [move for move in todo if self.rank in (move.source, move.target)]
        outgoing: dict[int, torch.Tensor] = {}
        incoming: dict[int, torch.Tensor] = {}
        for peer in range(self.count):
            there = [read(m.name, m.start, m.end) for m in mine if m.target == peer and m.source == self.rank]
            if there:
                outgoing[peer] = torch.from_numpy(np.concatenate(there))
            back = _bytes((m for m in mine if m.source == peer and m.target == self.rank), size)
            if back:
                incoming[peer] = torch.empty(back, dtype=torch.uint8)
        with _lost():
            works = [dist.isend(data, peer, group=self._group) for peer, data in outgoing.items()]
            works += [dist.irecv(data, peer, group=self._group) for peer, data in incoming.items()]
            for work in works:
                if work is not None:
                    work.wait()
        at = dict.fromkeys(incoming, 0)
        for move in mine:
            if move.target == self.rank:
                start = at[move.source]
                end = at[move.source] = start + (move.end - move.start) * size(move.name)
                write(move.name, move.start, move.end, incoming[move.source].numpy()[start:end])

    def close(self) -> None:
        dist.destroy_process_group(self._group)


def _bytes(todo: Iterable[Move], size: Size) -> int:
    return sum((move.end - move.start) * size(move.name) for move in todo)


@contextmanager
def _lost() -> Iterator[Any]:
    try:
        yield
    except RuntimeError as error:  # all that torch.distributed raises
        raise RankLost(f"a rank of the trainer did not answer: {error}") from error
