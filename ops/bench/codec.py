"""`rollwire bench codec`: both coders of weight deltas on real fine-tuning steps, against others and the entropy limits.

The data are six deltas of one step each (15 to 20) of MiniLM under a policy gradient at three learning rates, all
matrices but the word embeddings (`minilm` says how they are made). One thread; sizes are of everything stored, heads and
digests included; each round trip is compared bit for bit before it is timed. Speeds are bytes of the full weights a
second of the process's CPU time (zipnn works in threads of its own) over all six deltas, the best of the runs, beside a
memcpy of the same weights. `short` takes synthetic Adam steps instead and leaves zipnn out: it needs neither torch nor
the weights.

Figures, for each learning rate <r> of 1e-6, 3e-6, 1e-5:

    codec.changed_pct_<r>               elements that a step changes
    codec.entropy_pct_<r>               limit: what changes and by how much, given the old weight's exponent; % of full size
    codec.entropy_naive_pct_<r>         limit without the exponent
    codec.<coder>_pct_<r>               stored bytes, % of full size; coder = gap, context, inverse (context, backwards),
                                        xor, split, index, full, zipnn (see `codec_rivals`); baseline: xor
    codec.context_over_entropy_<r>      context_pct over entropy_pct
    codec.whole_<coder>_pct_<r>         gap and context with the vectors (biases, norms) that large models hardly have
    codec.<coder>_encode_gbps_<r>       baseline: memcpy
    codec.<coder>_apply_gbps_<r>        ours verified and written in place, both digests included; baseline: memcpy

and, as the bars name them, both at 1e-6:

    codec.context_over_entropy          the largest of the three
    codec.<coder>_encode_ratio          gap and context: speed over memcpy's
    codec.<coder>_apply_ratio           the same
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.delta.encode import encode_both, encode_delta
from rollwire.kernels.delta.prepare import prepare_delta
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import State, tensor
from rollwire.ops.bench.codec_rivals import Rival, pieces, rivals
from rollwire.ops.bench.delta import adam_states, to_bf16
from rollwire.ops.figures import Figure
from rollwire.schemas.errors import DigestMismatch

RATES: Final = ("1e-6", "3e-6", "1e-5")
_SPEED_RATE: Final = "1e-6"  # of the ratios without a rate in their name
_SHORT_STATES: Final = 2

Snapshot = Mapping[str, NDArray[np.uint16]]
Coder = Literal["gap", "context"]
CODERS: Final[tuple[Coder, ...]] = ("gap", "context")


class Speeds(NamedTuple):
    """Bytes of full weights a second."""

    encode: float
    apply: float


def limits(pairs: Sequence[tuple[State, State]]) -> tuple[float, float]:
    """Bytes: the entropy of (unchanged, or the step between sign-ordered bits), given the old bits' exponent, and as it is.

    Of bf16 states; over all pairs together, so that a coder which adapts to a tensor may be below.
    """
    held = np.zeros(256, np.int64)
    changed: list[NDArray[np.int64]] = []  # exponent << 32 | step
    for old, new in pairs:
        for name, t in old.items():
            a, b = t.bits, new[name].bits
            held += np.bincount((a >> 7) & 255, minlength=256)
            at = np.flatnonzero(a != b)
            changed.append(
                (((a[at] >> 7) & 255).astype(np.int64) << 32) + (_ordered(b[at]) - _ordered(a[at]))
            )
    keys, counts = np.unique(np.concatenate(changed), return_counts=True)
    exponents = (keys + (1 << 31)) >> 32
    steps = keys - (exponents << 32)
    conditional = 0.0
    for exponent in np.flatnonzero(held):
        own = counts[exponents == exponent]
        conditional += _entropy_bits([int(held[exponent] - own.sum()), *own.tolist()])
    naive = np.bincount(np.unique(steps, return_inverse=True)[1], weights=counts)
    total = _entropy_bits([int(held.sum() - counts.sum()), *naive.tolist()])
    return conditional / 8, total / 8


def _ordered(bits: NDArray[Any]) -> NDArray[np.int64]:
    wide = bits.astype(np.int64)
    return np.where(wide & 0x8000, 0xFFFF - wide, wide | 0x8000)


def _entropy_bits(counts: Sequence[float]) -> float:
    n = np.array([count for count in counts if count], dtype=np.float64)
    return float(-(n * np.log2(n / n.sum())).sum()) if n.size else 0.0


def bench_codec(*, repeats: int = 5, short: bool = False, mib: int = 8) -> list[Figure]:
    """All figures. `mib`: size of the synthetic states of the short form.

    Raises `DigestMismatch` if any coder loses a bit, `ModuleNotFoundError` where the weights' package, torch, transformers
    or zipnn is missing.
    """
    others = rivals(zipnn=not short)
    figures: list[Figure] = []
    over: list[float] = []
    for rate in RATES:
        snapshots = _synthetic(rate, mib) if short else _real(rate)
        found = list(_measure(rate, snapshots, others, repeats))
        over += [f.value for f in found if f.name == f"codec.context_over_entropy_{rate}"]
        figures += found
    figures.append(Figure(name="codec.context_over_entropy", value=max(over), unit="x"))
    by_name = {figure.name: figure for figure in figures}
    for coder in CODERS:
        for way in ("encode", "apply"):
            speed = by_name[f"codec.{coder}_{way}_gbps_{_SPEED_RATE}"]
            figures.append(
                Figure(name=f"codec.{coder}_{way}_ratio", value=speed.ratio or 0.0, unit="of memcpy")
            )
    return figures


def _real(rate: str) -> list[Snapshot]:
    from rollwire.ops.bench.minilm import snapshots

    return list(snapshots(rate))


def _synthetic(rate: str, mib: int) -> list[Snapshot]:
    """Pairs of gaussian matrices before and after one Adam step, as consecutive snapshots with a vector beside."""
    old, new = adam_states(max(1, (mib << 20) // 2048), float(rate), 0)
    snapshots = [to_bf16(w) for w in (old, new)]
    return [{"weight": w, "bias": w[0].copy()} for w in snapshots]


def _pairs(snapshots: Sequence[Snapshot], *, matrices: bool) -> list[tuple[State, State]]:
    states = [
        {name: tensor("BF16", w.shape, w) for name, w in snapshot.items() if w.ndim > 1 or not matrices}
        for snapshot in snapshots
    ]
    return list(pairwise(states))


def _measure(
    rate: str, snapshots: Sequence[Snapshot], others: Sequence[Rival], repeats: int
) -> Iterator[Figure]:
    pairs = _pairs(snapshots, matrices=True)
    full = sum(t.nbytes for old, _ in pairs for t in old.values())
    differ = sum(
        int(np.count_nonzero(t.bits != new[name].bits)) for old, new in pairs for name, t in old.items()
    )
    conditional, naive = limits(pairs)
    yield Figure(name=f"codec.changed_pct_{rate}", value=100 * differ / (full / 2), unit="%")
    yield Figure(name=f"codec.entropy_pct_{rate}", value=100 * conditional / full, unit="%")
    yield Figure(name=f"codec.entropy_naive_pct_{rate}", value=100 * naive / full, unit="%")
    memcpy = _memcpy(pairs, full, repeats)
    sizes: dict[str, int] = {}
    speeds: dict[str, Speeds] = {}
    for coder in CODERS:
        sizes[coder], speeds[coder] = _ours(pairs, coder, full, repeats)
    sizes["inverse"] = sum(
        len(shard) for old, new in pairs for shard in encode_both(old, new, coder="context")[1].shards
    )
    for other in others:
        sizes[other.name], speeds[other.name] = _theirs(pairs, other, full, repeats)
    for name, size in sizes.items():
        yield Figure(
            name=f"codec.{name}_pct_{rate}",
            value=100 * size / full,
            unit="%",
            baseline=100 * sizes["xor"] / full,
        )
    yield Figure(name=f"codec.context_over_entropy_{rate}", value=sizes["context"] / conditional, unit="x")
    for name, speed in speeds.items():
        for way, value in speed._asdict().items():
            yield Figure(
                name=f"codec.{name}_{way}_gbps_{rate}", value=value / 1e9, unit="GB/s", baseline=memcpy / 1e9
            )
    whole = _pairs(snapshots, matrices=False)
    whole_full = sum(t.nbytes for old, _ in whole for t in old.values())
    for coder in CODERS:
        stored = sum(len(shard) for old, new in whole for shard in encode_delta(old, new, coder=coder).shards)
        yield Figure(name=f"codec.whole_{coder}_pct_{rate}", value=100 * stored / whole_full, unit="%")


def _best(
    full: int, repeats: int, work: Callable[[], Any], between: Callable[[], Any] | None = None
) -> float:
    """Bytes a second of the process's CPU time in the fastest of `repeats` runs; `between` is not timed."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
        if between is not None:
            between()
    return full / max(best, 1e-9)


def _memcpy(pairs: Sequence[tuple[State, State]], full: int, repeats: int) -> float:
    """Of all weights, onto memory that was touched."""
    copies = [(np.array(t.bits), t.bits) for old, _ in pairs for t in old.values()]

    def work() -> None:
        for to, source in copies:
            np.copyto(to, source)

    return _best(full, max(repeats, 5), work)


def _ours(pairs: Sequence[tuple[State, State]], coder: Coder, full: int, repeats: int) -> tuple[int, Speeds]:
    digests = [StateDigest.of(old) for old, _ in pairs]

    def encode() -> list[tuple[bytes, ...]]:
        return [
            encode_delta(old, new, base=digest, coder=coder).shards
            for (old, new), digest in zip(pairs, digests, strict=True)
        ]

    deltas = encode()
    served = [{name: t._replace(bits=np.array(t.bits)) for name, t in old.items()} for old, _ in pairs]
    prepared: list[Any] = []

    def apply() -> None:
        for state, digest, shards in zip(served, digests, deltas, strict=True):
            prepared.append(prepare_delta(state, digest, shards))
            prepared[-1].apply()

    def undo() -> None:
        for one in prepared:
            one.undo()
        prepared.clear()

    apply()
    for state, (_, new) in zip(served, pairs, strict=True):
        _compare(coder, [t.bits for t in new.values()], [state[name].bits for name in new])
    undo()
    size = sum(len(shard) for shards in deltas for shard in shards)
    return size, Speeds(_best(full, repeats, encode), _best(full, repeats, apply, undo))


def _theirs(
    pairs: Sequence[tuple[State, State]], other: Rival, full: int, repeats: int
) -> tuple[int, Speeds]:
    flat = [
        (pieces([t.bits for t in old.values()]), pieces([new[name].bits for name in old]))
        for old, new in pairs
    ]

    def encode() -> list[list[bytes]]:
        return [other.encode(old, new) for old, new in flat]

    frames = encode()

    def decode() -> list[list[NDArray[Any]]]:
        return [list(other.decode(old, own)) for (old, _), own in zip(flat, frames, strict=True)]

    for (_, new), result in zip(flat, decode(), strict=True):
        _compare(other.name, new, result)
    size = sum(len(frame) for own in frames for frame in own)
    return size, Speeds(_best(full, repeats, encode), _best(full, repeats, decode))


def _compare(coder: str, wanted: Sequence[NDArray[Any]], got: Sequence[NDArray[Any]]) -> None:
    if not all(np.array_equal(a, b) for a, b in zip(wanted, got, strict=True)):
        raise DigestMismatch(f"{coder} does not give the same bits back")
