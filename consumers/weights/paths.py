"""Which way to a version is the cheapest: Dijkstra by bytes over snapshots, deltas and links, in both directions.

    nothing --anchor--> version             the full snapshot of any version that has one
    base --delta--> version                 what the version was published as
    base --link--> version                  a delta over several versions, or an inverse (`weight-links`)
    version --delta or link--> base         backwards, where it was made by the gap coder (its mapping is a bijection)
                                            and whole tensors are held (sums of other chunks are known forwards alone)
    version ------> version                 for nothing, where the state's digest is the same (a revert, a skipped step)

A way that a `gone` event names leads nowhere any more. A link whose digests are not those of its two versions was
written by somebody who was never committed, and is passed over.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, Literal, NamedTuple

from rollwire.kernels.tensors import CHUNK_ELEMENTS
from rollwire.schemas.errors import WeightError
from rollwire.schemas.records import Claim, WeightLink, WeightVersion

GAP: Final = "gap"
"""The coder whose deltas run backwards as they are."""

HEAD_BYTES_A_CHUNK: Final = 40
"""Of a shard's table, about: what a reader of a slice reads of every changed chunk, also of those it does not hold."""

StepKind = Literal["anchor", "delta", "skip", "inverse", "same"]


class StepKey(NamedTuple):
    """What a step reads, as a name for it in `avoid`: backwards reads the same objects as forwards."""

    kind: StepKind
    version: int  # that the objects were made for
    base: int | None
    coder: str


class PathStep(NamedTuple):
    """One way to get a version."""

    event: WeightVersion  # the version that it gives
    kind: StepKind
    base: int | None  # the version that it applies to; None = anchor
    source: WeightVersion | WeightLink  # whose objects are read
    backwards: bool
    bytes: int  # read, about

    @property
    def full(self) -> bool:
        return self.kind == "anchor"

    @property
    def key(self) -> StepKey:
        if self.full:
            return StepKey("anchor", self.event.version, None, "")
        return StepKey(self.kind, self.source.version, self.source.base_version, self.source.coder)

    def __str__(self) -> str:
        if self.full:
            return f"anchor {self.event.version}"
        return f"{self.kind} {self.base}>{self.event.version}"


def anchor_claim(event: WeightVersion) -> Claim | None:
    """The manifest of the version's full snapshot, where there is one."""
    return event.manifest if event.kind == "anchor" else event.anchor


def anchor_step(event: WeightVersion) -> PathStep:
    return PathStep(event, "anchor", None, event, False, event.full_bytes)


def delta_step(event: WeightVersion) -> PathStep:
    """The version's own delta on `event.base_version`."""
    return PathStep(event, "delta", event.base_version, event, False, event.stored_bytes)


class _Cost(NamedTuple):
    bytes: int
    steps: int


class _Costs(NamedTuple):
    """What a way costs to whom: a replica that holds a slice reads the heads of deltas whole, and its share of the rest."""

    share: float

    def anchor(self, event: WeightVersion) -> int:
        return round(event.full_bytes * self.share)

    def delta(self, stored: int, head: int) -> int:
        head = min(head, stored)
        return head + round((stored - head) * self.share)


def plan_path(
    events: Sequence[WeightVersion],
    links: Sequence[WeightLink],
    have: int | None,
    want: int,
    *,
    avoid: Collection[StepKey] = (),
    slice_share: float = 1.0,
) -> list[PathStep]:
    """The steps from version `have` (None = nothing is held) to `want` that read the fewest bytes; [] if it is held.

    `events` are of one lineage, in any order; of repeats the first counts. `links` are in the order of the log; those of
    other lineages are passed over. `avoid` holds the keys of steps that proved unusable. `slice_share` is the part of
    every tensor that is held, in (0, 1]. Equal costs: fewer steps. Raises `WeightError` where no way leads there.
    """
    known = known_versions(events)
    steps = every_step(known, links, slice_share)
    path = cheapest((step for step in steps if step.key not in avoid), have, want)
    if path is None:
        raise WeightError(_no_way(known, have, want, len(avoid)))
    return path


def cheapest(steps: Iterable[PathStep], have: int | None, want: int) -> list[PathStep] | None:
    """The cheapest way over `steps`; None where there is none."""
    if have == want:
        return []
    onwards: dict[int | None, list[PathStep]] = {}
    for step in steps:
        onwards.setdefault(step.base, []).append(step)
    reached = _reach(onwards, have, want)
    return _walk_back(reached, want) if want in reached else None


def known_versions(events: Sequence[WeightVersion]) -> dict[int, WeightVersion]:
    """By version; of repeats the first counts."""
    known: dict[int, WeightVersion] = {}
    for event in events:
        known.setdefault(event.version, event)
    return known


def every_step(
    known: dict[int, WeightVersion], links: Sequence[WeightLink], slice_share: float = 1.0
) -> Iterator[PathStep]:
    """Every way between known versions that is not gone."""
    costs = _Costs(slice_share)
    lineages = {(event.model, event.lineage) for event in known.values()}
    gone, usable = _fold(known, [link for link in links if (link.model, link.lineage) in lineages])
    for event in known.values():
        if anchor_claim(event) is not None and (event.version, None) not in gone:
            yield anchor_step(event)._replace(bytes=costs.anchor(event))
        base = event.base_version
        if base is None or (event.version, base) in gone:
            continue
        chunks = -(-event.total_elements // CHUNK_ELEMENTS)
        size = costs.delta(event.stored_bytes, HEAD_BYTES_A_CHUNK * chunks)
        yield PathStep(event, "delta", base, event, False, size)
        if event.coder == GAP and base in known and slice_share == 1.0:
            yield PathStep(known[base], "delta", event.version, event, True, size)
    for link in usable:
        base = link.base_version
        if base is None:
            continue
        size = costs.delta(link.stored_bytes, sum(shard.head_bytes for shard in link.objects))
        kind: StepKind = "inverse" if link.kind == "inverse" else "skip"
        yield PathStep(known[link.version], kind, base, link, False, size)
        if link.coder == GAP and slice_share == 1.0:
            yield PathStep(known[base], kind, link.version, link, True, size)
    yield from _equal_states(known)


def _fold(
    known: dict[int, WeightVersion], links: Sequence[WeightLink]
) -> tuple[set[tuple[int, int | None]], list[WeightLink]]:
    """The ways that are gone as (version, base), and the links that can be used, in the order of the log."""
    gone: set[tuple[int, int | None]] = set()
    usable: dict[tuple[int, int | None], dict[str, WeightLink]] = {}
    for link in links:
        ends = (link.version, link.base_version)
        if link.kind == "gone":
            gone.add(ends)
            usable.pop(ends, None)
        elif link.kind != "unknown" and _fits(known, link):
            usable.setdefault(ends, {})[link.coder] = link
    return gone, [link for coders in usable.values() for link in coders.values()]


def _fits(known: dict[int, WeightVersion], link: WeightLink) -> bool:
    if link.base_version is None or link.version not in known or link.base_version not in known:
        return False
    return (
        known[link.version].state_digest == link.state_digest
        and known[link.base_version].state_digest == link.base_digest
    )


def _equal_states(known: dict[int, WeightVersion]) -> Iterator[PathStep]:
    """Neighbours among the versions of one state, both ways: one step each, however many there are."""
    last: dict[str, WeightVersion] = {}
    for version in sorted(known):
        event = known[version]
        before = last.get(event.state_digest)
        if before is not None:
            yield PathStep(event, "same", before.version, event, False, 0)
            yield PathStep(before, "same", event.version, event, False, 0)
        last[event.state_digest] = event


def _reach(
    onwards: dict[int | None, list[PathStep]], have: int | None, want: int
) -> dict[int, tuple[_Cost, PathStep | None]]:
    # An anchor leads on from nothing, so from anything: Dijkstra over versions, with None as a start of its own.
    queue: list[tuple[_Cost, int]] = []
    reached: dict[int, tuple[_Cost, PathStep | None]] = {}

    def reach(cost: _Cost, version: int, step: PathStep | None) -> None:
        if version not in reached or cost < reached[version][0]:
            reached[version] = (cost, step)
            heapq.heappush(queue, (cost, version))

    if have is not None:
        reach(_Cost(0, 0), have, None)
    for step in onwards.get(None, ()):
        reach(_Cost(step.bytes, 1), step.event.version, step)
    while queue:
        cost, version = heapq.heappop(queue)
        if cost > reached[version][0]:
            continue
        if version == want:
            break
        for step in onwards.get(version, ()):
            more = _Cost(cost.bytes + step.bytes, cost.steps + (step.kind != "same"))
            reach(more, step.event.version, step)
    return reached


def _walk_back(reached: dict[int, tuple[_Cost, PathStep | None]], want: int) -> list[PathStep]:
    path: list[PathStep] = []
    version: int | None = want
    while version is not None and (step := reached[version][1]) is not None:
        path.append(step)
        version = step.base
    return path[::-1]


def _no_way(known: dict[int, WeightVersion], have: int | None, want: int, avoided: int) -> str:
    start = "nothing" if have is None else f"version {have}"
    span = f"{min(known)} to {max(known)} ({len(known)})" if known else "none"
    anchors = [version for version, event in sorted(known.items()) if anchor_claim(event) is not None]
    nearest = [version for version in anchors if version <= want][-3:]
    return (
        f"no way from {start} to version {want}: known are {span}, full snapshots at or below it "
        f"{nearest or 'none'}, {avoided} steps proved unusable; `rollwire weights ls` lists what is kept"
    )
