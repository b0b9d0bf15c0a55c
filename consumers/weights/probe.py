"""The known-answer probe: a sample of the served bits, read back from the target, against the sums that the version's
digest is made of.

A chunk's sum is part of the digest that the version's event announces, so it is known before anything is served. The sample
is drawn anew for each version, half of it from tensors that just changed: over some versions every chunk is looked at.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate
from typing import Final

from rollwire.consumers.weights.targets.target import Sample, Target
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import CHUNK_ELEMENTS, State, Tensor, held_chunks
from rollwire.schemas.errors import DigestMismatch, ProbeFailed
from rollwire.schemas.records import WeightVersion

SAMPLES: Final = 8

Probe = Callable[[WeightVersion], None]
"""Asks what serves a question whose answer is known. Raises `ProbeFailed`, or anything else, where the answer is wrong."""


def draw_samples(
    state: State, changed: Collection[str] | None, *, seed: int, count: int = SAMPLES
) -> list[Sample]:
    """Up to `count` chunks of what is held, no two the same."""
    rng = random.Random(seed)  # a sample, not a secret
    names = sorted(state)
    moved = names if changed is None else [name for name in names if name in changed]
    drawn = dict.fromkeys(_draw(state, moved, rng, count // 2))
    drawn |= dict.fromkeys(_draw(state, names, rng, count - len(drawn)))
    return list(drawn)


def _draw(state: State, names: Sequence[str], rng: random.Random, count: int) -> Iterator[Sample]:
    """Every chunk is as likely as any other; the same one may come twice."""
    ends = list(accumulate(len(held_chunks(state[name], name)) for name in names))
    if not ends or ends[-1] == 0:
        return
    for _ in range(count):
        at = rng.randrange(ends[-1])
        name = names[bisect_right(ends, at)]
        one = state[name]
        last = ends[bisect_right(ends, at)]
        start = (held_chunks(one, name).stop - (last - at)) * CHUNK_ELEMENTS
        yield Sample(name, start, min(start + CHUNK_ELEMENTS, one.elements))


def probe_bits(target: Target, samples: Collection[Sample], state: State, digest: StateDigest) -> bool:
    """Whether the target could be read back. Raises `ProbeFailed` where a bit is not what was published."""
    wanted = list(samples)
    found = target.read_back(wanted)
    if found is None:
        return False
    for sample, bits in zip(wanted, found, strict=True):
        part = Tensor(state[sample.name].dtype, state[sample.name].shape, bits, sample.start)
        try:
            digest.check({sample.name: part})
        except DigestMismatch as error:
            raise ProbeFailed(
                f"{sample.name}: elements {sample.start} to {sample.end} are served with other bits than published"
            ) from error
    return True
