"""Deltas that follow one another in one pass: the same states and digests as one by one, and the same refusals."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
import pytest

from rollwire.kernels.delta.apply import DeltaStage
from rollwire.kernels.delta.chain import apply_chain
from rollwire.kernels.delta.encode import encode_delta
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import CHUNK_ELEMENTS, State, Tensor
from rollwire.schemas.errors import BaseMismatch, DeltaCorrupt

SIZES = {"a": 3 * CHUNK_ELEMENTS + 17, "b": 5, "c": CHUNK_ELEMENTS, "empty": 0}


def states(count: int, dtype: str = "BF16", lane: int = 2) -> list[State]:
    """Each a few steps from the one before it; tensor c changes in some only."""
    rng = np.random.default_rng(7)
    made: list[State] = []
    bits = {
        name: rng.integers(0, 256, size * lane, np.uint8).view(f"<u{lane}") for name, size in SIZES.items()
    }
    for number in range(count):
        made.append({name: Tensor(dtype, (SIZES[name],), b.copy()) for name, b in bits.items()})
        for name, b in bits.items():
            if name == "c" and number % 2:
                continue
            moved = rng.random(b.size) < 0.05
            b[moved] += rng.choice(np.array([1, (1 << 8 * lane) - 1, 5], b.dtype), int(moved.sum()))
    return made


def deltas(of: Sequence[State], coder: Literal["gap", "context"] = "gap") -> list[tuple[bytes, ...]]:
    return [encode_delta(old, new, coder=coder, shard_bytes=40_000).shards for old, new in pairwise(of)]


def bits_of(state: State) -> dict[str, bytes]:
    return {name: t.bits.tobytes() for name, t in state.items()}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("dtype", "lane"), [("BF16", 2), ("F8_E4M3", 1), ("F32", 4), ("I64", 8)])
def test_one_pass_gives_what_one_by_one_gives(dtype: str, lane: int, threads: int) -> None:
    of = states(6, dtype, lane)
    before = bits_of(of[0])
    stage = DeltaStage(of[0], StateDigest.of(of[0]), threads=threads)
    made = deltas(of)
    assert len(made[0]) > 1  # shards
    nothing: tuple[bytes, ...] = ()
    digests = stage.apply_chain([*made[:3], nothing, *made[3:]])
    wanted = [StateDigest.of(state).hex for state in of[1:]]
    assert digests == [*wanted[:3], wanted[2], *wanted[3:]]
    done = stage.done()
    assert (bits_of(done.state), done.digest.hex) == (bits_of(of[-1]), wanted[-1])
    assert bits_of(of[0]) == before  # what is served is never written to
    assert stage.apply_chain([]) == []


def test_what_one_pass_cannot_do_is_done_one_by_one() -> None:
    of = states(4)
    stage = DeltaStage(of[0], StateDigest.of(of[0]))
    copied = {name: t._replace(bits=t.bits.copy()) for name, t in of[0].items()}
    assert apply_chain(copied, StateDigest.of(copied), deltas(of, "context")) is None
    assert bits_of(copied) == bits_of(of[0])
    assert stage.apply_chain(deltas(of, "context")) == [StateDigest.of(state).hex for state in of[1:]]
    mixed = [{**state, "wide": Tensor("F32", (2,), np.full(2, i, "<u4"))} for i, state in enumerate(of)]
    stage = DeltaStage(mixed[0], StateDigest.of(mixed[0]))
    assert stage.apply_chain(deltas(mixed)) == [StateDigest.of(state).hex for state in mixed[1:]]


def test_damage_gaps_and_missing_shards_are_refused() -> None:
    of = states(5)
    made = deltas(of)

    def refused(chain: Sequence[Sequence[bytes]], error: type[Exception], match: str) -> None:
        stage = DeltaStage(of[0], StateDigest.of(of[0]))
        with pytest.raises(error, match=match):
            stage.apply_chain(chain)

    damaged = bytearray(made[2][1])
    damaged[-1] ^= 0x10
    refused([*made[:2], (made[2][0], bytes(damaged), *made[2][2:]), made[3]], DeltaCorrupt, "damaged")
    refused([made[0], made[2]], BaseMismatch, "the delta is for base")
    refused([made[1]], BaseMismatch, "the delta is for base")
    refused([made[0], made[1][1:]], DeltaCorrupt, "shards of a delta")
    refused([made[0], (made[1][0][:-3], *made[1][1:])], DeltaCorrupt, "its head says")
