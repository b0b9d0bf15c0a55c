"""A skip link out of the deltas and shorter links that it leads over, by their objects alone: no state is needed.

So it can be made by whoever has the log and the store: the publisher beside its trainer, or anybody later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rollwire.consumers.weights.links import skips_due, write_link
from rollwire.consumers.weights.paths import GAP, PathStep, Ways, cheapest, known_versions
from rollwire.consumers.weights.reader import read_shards
from rollwire.kernels.delta.compose import compose_deltas
from rollwire.schemas.errors import DigestMismatch, WeightError
from rollwire.schemas.records import WeightLink, WeightVersion
from rollwire.streams.seams.store import ObjectStore

SHARD_BYTES = 64 << 20


def missing_skips(
    events: Sequence[WeightVersion], links: Sequence[WeightLink], last: int
) -> list[tuple[int, int]]:
    """The skip links (base, version) that are due at the newest `last` versions and are neither there nor gone, shortest
    first at each version: longer ones are composed of them. For those whose builder fell behind, died or never ran."""
    known = known_versions(events)
    if not known:
        return []
    first, newest = min(known), max(known)
    there = {(link.version, link.base_version) for link in links}
    return [
        (base, version)
        for version in range(max(first, newest - last + 1), newest + 1)
        for base, _ in skips_due(version, first)
        if (version, base) not in there
    ]


def plan_chain(
    events: Sequence[WeightVersion], links: Sequence[WeightLink], base: int, version: int
) -> list[PathStep]:
    """Gap deltas and links that follow one another from `base` to `version`, the fewest bytes of them.

    Raises `WeightError` where there is no such chain: a delta between is of the context coder, or gone.
    """
    known = known_versions(events)
    if base not in known or version not in known:
        raise WeightError(f"versions {base} and {version} are not both known in this lineage")
    ways = Ways(known, links)

    def forwards(to: int) -> Iterator[PathStep]:
        for step in ways.into(to):
            inside = step.base is not None and base <= step.base < to <= version
            if inside and (step.kind == "same" or step.source.coder in (GAP, "")) and not step.backwards:
                yield step

    chain = cheapest(forwards, base, version)
    if chain is None:
        raise WeightError(
            f"no chain of gap deltas leads from version {base} to version {version}: encode it from the states"
        )
    return chain


def compose_link(
    store: ObjectStore,
    events: Sequence[WeightVersion],
    links: Sequence[WeightLink],
    base: int,
    version: int,
    *,
    published_us: int,
    shard_bytes: int = SHARD_BYTES,
    threads: int = 1,
) -> WeightLink:
    """Fetches a chain, composes it and writes the link; returned is the event that makes it known.

    In memory: the chain's shards and the outcome. Raises what `plan_chain`, `write_composed` and the store raise.
    """
    known = known_versions(events)
    chain = [step for step in plan_chain(events, links, base, version) if step.kind != "same"]
    return write_composed(
        store,
        known[base],
        known[version],
        ([*read_shards(store, step)] for step in chain),
        published_us=published_us,
        shard_bytes=shard_bytes,
        threads=threads,
    ).link


class Composed(NamedTuple):
    link: WeightLink
    shards: Sequence[bytes]  # of each of the link's objects


def write_composed(
    store: ObjectStore,
    base: WeightVersion,
    target: WeightVersion,
    chain: Iterable[Sequence[bytes]],
    *,
    published_us: int,
    shard_bytes: int = SHARD_BYTES,
    threads: int = 1,
) -> Composed:
    """Composes `chain`, the shards of gap deltas that follow one another from `base` to `target`, and writes the link.

    Raises what `compose_deltas` and the store raise, and `DigestMismatch` where the chain does not lead from the one
    published state to the other.
    """
    composed = compose_deltas(*chain, shard_bytes=shard_bytes, threads=threads)
    published = (base.state_digest, target.state_digest)
    if composed.shards and (composed.base, composed.result) != published:
        raise DigestMismatch(
            f"deltas from version {base.version} to {target.version} lead from {composed.base[:16]} to "
            f"{composed.result[:16]}, published are {published[0][:16]} and {published[1][:16]}"
        )
    link = write_link(
        store, base, target, composed.shards, composed.heads, coder=GAP, published_us=published_us
    )
    return Composed(link, composed.shards)
