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
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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


_Ends = tuple[int, int | None]  # (version, base version)


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
    into = Ways(known, links, slice_share).into
    path = cheapest(lambda version: (s for s in into(version) if s.key not in avoid), have, want)
    if path is None:
        raise WeightError(_no_way(known, have, want, len(avoid)))
    return path


def known_versions(events: Sequence[WeightVersion]) -> dict[int, WeightVersion]:
    """By version; of repeats the first counts."""
    known: dict[int, WeightVersion] = {}
    for event in events:
        known.setdefault(event.version, event)
    return known


class Ways:
    """Every way between known versions that is not gone. Making one takes a few microseconds a version; steps are made when
    they are asked for, since a lineage has tens of thousands and a path touches a few."""

    def __init__(
        self, known: dict[int, WeightVersion], links: Sequence[WeightLink], slice_share: float = 1.0
    ) -> None:
        self._known = known
        self._costs = _Costs(slice_share)
        self._whole = slice_share == 1.0
        self._gone: dict[_Ends, int] = {}  # -> place in the log of links
        self._links: defaultdict[int, list[tuple[int, WeightLink]]] = defaultdict(list)  # by either end
        self._next: defaultdict[int, list[int]] = defaultdict(
            list
        )  # base -> versions whose own delta is on it
        self._alike: defaultdict[str, list[int]] = defaultdict(list)  # digest -> versions, ascending
        for event in known.values():
            if event.base_version is not None:
                self._next[event.base_version].append(event.version)
        for version in sorted(known):
            self._alike[known[version].state_digest].append(version)
        self._fold(links)

    def __iter__(self) -> Iterator[PathStep]:
        for version in self._known:
            yield from self.into(version)

    def into(self, version: int) -> Iterator[PathStep]:
        """Every step that gives `version`."""
        event = self._known.get(version)
        if event is None:
            return
        if anchor_claim(event) is not None and (version, None) not in self._gone:
            yield anchor_step(event)._replace(bytes=self._costs.anchor(event))
        if event.base_version is not None and (version, event.base_version) not in self._gone:
            yield delta_step(event)._replace(bytes=self._delta_bytes(event))
        for later in self._next.get(version, ()) if self._whole else ():
            source = self._known[later]
            if source.coder == GAP and (later, version) not in self._gone:
                yield PathStep(event, "delta", later, source, True, self._delta_bytes(source))
        for place, link in self._links.get(version, ()):
            if place > self._gone.get((link.version, link.base_version), -1) and self._fits(link):
                yield from self._over(link, event)
        yield from self._same(event)

    def _over(self, link: WeightLink, event: WeightVersion) -> Iterator[PathStep]:
        kind: StepKind = "inverse" if link.kind == "inverse" else "skip"
        size = self._costs.delta(link.stored_bytes, sum(shard.head_bytes for shard in link.objects))
        if link.version == event.version:
            yield PathStep(event, kind, link.base_version, link, False, size)
        elif link.coder == GAP and self._whole:
            yield PathStep(event, kind, link.version, link, True, size)

    def _same(self, event: WeightVersion) -> Iterator[PathStep]:
        """From its neighbours among the versions of one state: one step each, however many there are."""
        alike = self._alike[event.state_digest]
        if len(alike) == 1:
            return
        at = bisect_left(alike, event.version)
        for other in (*alike[max(0, at - 1) : at], *alike[at + 1 : at + 2]):
            yield PathStep(event, "same", other, event, False, 0)

    def _delta_bytes(self, event: WeightVersion) -> int:
        chunks = -(-event.total_elements // CHUNK_ELEMENTS)
        return self._costs.delta(event.stored_bytes, HEAD_BYTES_A_CHUNK * chunks)

    def _fold(self, links: Sequence[WeightLink]) -> None:
        """In the order of the log: what is gone, and the links that can be used."""
        one = next(iter(self._known.values()), None)
        for place, link in enumerate(links):
            if one is None or (link.model, link.lineage) != (one.model, one.lineage):
                continue
            if link.kind == "gone":
                self._gone[link.version, link.base_version] = place
            elif link.kind != "unknown" and link.base_version is not None:
                self._links[link.version].append((place, link))
                self._links[link.base_version].append((place, link))

    def _fits(self, link: WeightLink) -> bool:
        if (
            link.base_version is None
            or link.version not in self._known
            or link.base_version not in self._known
        ):
            return False
        return (
            self._known[link.version].state_digest == link.state_digest
            and self._known[link.base_version].state_digest == link.base_digest
        )


def cheapest(into: Callable[[int], Iterable[PathStep]], have: int | None, want: int) -> list[PathStep] | None:
    """The cheapest way from `have` (None = nothing) to `want` over the steps `into` each version; None: there is none.

    Dijkstra from the end: a follower is near it, and what lies far behind is never looked at. An anchor leads on from
    nothing, so from anything, and ends the search as `have` does.
    """
    if have == want:
        return []
    queue: list[tuple[_Cost, int, bool]] = [(_Cost(0, 0), want, False)]
    onwards: dict[tuple[int, bool], tuple[_Cost, PathStep | None]] = {(want, False): (_Cost(0, 0), None)}
    while queue:
        cost, version, done = heapq.heappop(queue)
        if cost > onwards[version, done][0]:
            continue
        if done or version == have:
            return _walk(onwards, version, done)
        for step in into(version):
            # (version, True): begun with the snapshot of that version.
            place = (version, True) if step.base is None else (step.base, False)
            more = _Cost(cost.bytes + step.bytes, cost.steps + (step.kind != "same"))
            if place not in onwards or more < onwards[place][0]:
                onwards[place] = (more, step)
                heapq.heappush(queue, (more, place[0], place[1]))
    return None


def _walk(
    onwards: dict[tuple[int, bool], tuple[_Cost, PathStep | None]], version: int, begun: bool
) -> list[PathStep]:
    path: list[PathStep] = []
    place = (version, begun)
    while (step := onwards[place][1]) is not None:
        path.append(step)
        place = (step.event.version, False)
    return path


def _no_way(known: dict[int, WeightVersion], have: int | None, want: int, avoided: int) -> str:
    start = "nothing" if have is None else f"version {have}"
    span = f"{min(known)} to {max(known)} ({len(known)})" if known else "none"
    anchors = [version for version, event in sorted(known.items()) if anchor_claim(event) is not None]
    nearest = [version for version in anchors if version <= want][-3:]
    return (
        f"no way from {start} to version {want}: known are {span}, full snapshots at or below it "
        f"{nearest or 'none'}, {avoided} steps proved unusable; `rollwire weights ls` lists what is kept"
    )
