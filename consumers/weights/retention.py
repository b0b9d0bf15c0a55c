"""What may be deleted from the store, and the proof of it. Pure: the log, the listing and the clock are arguments.

A version is kept for a reason: among the newest, one in so many for good, promoted, served, pinned, or at or above its
lineage's newest checkpoint (a restarted trainer replays from there and compares every version). For each kept version the
cheapest way to it from nothing is kept, whatever lies on it; between the newest, every way is. An object is

    live       if a way that is kept reads it, or it is the manifest or checkpoint of a kept version
    expired    if the log names it, and no way that is kept
    orphan     if nothing in the log names it, and the log reaches back to when it was made
    unproved   if nothing names it, but something may that is not at hand: it stays

Expired and orphaned objects go once they are older than the grace, which is twice what a writer trusts an object for that
he finds in place of his own (law 3). Two logs may share a bucket, and even objects, where the same training gave the same
bytes: of a folder with manifests or checkpoints of lineages that this log does not know, nothing is deleted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from rollwire.consumers.weights.paths import (
    PathStep,
    StepKey,
    Ways,
    anchor_claim,
    cheapest,
    known_versions,
)
from rollwire.schemas.records import WeightLink, WeightVersion
from rollwire.streams.seams.store import ObjectInfo

GRACE_US: Final = 24 * 3600 * 1_000_000
FOR_EVER: Final = 0
"""A log that reaches back to the beginning."""

Fate = Literal["live", "young", "expired", "orphan", "unproved"]


class RetentionConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    keep_last: int = Field(
        default=64,
        ge=1,
        description="Newest versions of each lineage that are kept, with every way between them.",
    )
    keep_every: int = Field(
        default=100,
        ge=1,
        description="One version in so many is kept for good, with a way to it from nothing.",
    )
    grace_us: int = Field(
        default=GRACE_US, ge=0, description="An object younger than this is never deleted; microseconds."
    )


class Held(NamedTuple):
    """What holds versions besides the log of versions itself."""

    served: frozenset[str] = frozenset()  # state digests that replicas reported last
    promoted: Mapping[
        tuple[str, int], str
    ] = {}  # (lineage, version) -> the channel whose last promotion it is
    pinned: frozenset[int] = frozenset()  # versions that somebody asked to keep


class Census(NamedTuple):
    """The log and the store at one moment."""

    events: Sequence[WeightVersion]  # of all lineages, in the order of the log
    links: Sequence[WeightLink]
    held: Held
    objects: Sequence[ObjectInfo]  # all that is in the store under the folders that are looked after
    inside: Mapping[
        str, frozenset[str]
    ]  # manifest key -> keys of the objects that it names, as far as it can be read
    traces: frozenset[str] = frozenset()  # claim keys of routing traces in the log
    traces_from_us: int = FOR_EVER  # since when the log has all routing traces
    foreign: frozenset[str] = (
        frozenset()
    )  # folders with manifests or checkpoints of lineages that the log does not know


class Verdict(NamedTuple):
    """One object, what becomes of it, and why."""

    info: ObjectInfo
    fate: Fate
    proof: str


class Gone(NamedTuple):
    """A way that loses objects: followers are told before it does."""

    event: WeightVersion
    base_version: int | None


class Kept(NamedTuple):
    event: WeightVersion
    reasons: tuple[str, ...]
    path: tuple[PathStep, ...] | None  # from nothing; None = there is none


class Retention(NamedTuple):
    kept: tuple[Kept, ...]
    verdicts: tuple[Verdict, ...]  # by key
    gone: tuple[Gone, ...]
    broken: tuple[str, ...]  # kept versions that cannot be read any more: nothing of their lineage is deleted

    @property
    def deletions(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.fate in ("expired", "orphan")]


class _Named(NamedTuple):
    """Something of the log that names objects."""

    title: str  # "delta 4>5 of lineage x"
    keys: frozenset[str]
    live: str  # why it is kept; "" = it is not
    way: Gone | None


def plan_retention(census: Census, config: RetentionConfig, now_us: int) -> Retention:
    """What becomes of every object of the census. Raises nothing: what cannot be proved stays."""
    kept: list[Kept] = []
    named: list[_Named] = []
    broken: list[str] = []
    present = {info.key for info in census.objects}
    for lineage, events in _by_lineage(census.events).items():
        known = known_versions(events)
        links = [link for link in census.links if link.lineage == lineage]
        mine = _kept(census, config, known, links)
        wrong = [text for one in mine for text in _unreadable(census, present, one)]
        kept += mine
        broken += wrong
        named += _names(census, config, known, links, mine, keep_all=bool(wrong))
    live = dict.fromkeys(census.traces, "a routing trace in the log names it")
    dead: defaultdict[str, list[_Named]] = defaultdict(list)
    for thing in named:
        for key in thing.keys:
            if thing.live:
                live.setdefault(key, f"{thing.title}: {thing.live}")
            else:
                dead[key].append(thing)
    verdicts = tuple(
        _verdict(census, config, info, live.get(info.key), dead.get(info.key, []), now_us)
        for info in sorted(census.objects)
    )
    lost = {verdict.info.key for verdict in verdicts if verdict.fate == "expired"}
    ways = [(thing, thing.way) for thing in named if thing.way is not None]
    # What is said of two versions is said of every way between them.
    stay = {_ends(way) for thing, way in ways if thing.live}
    gone = {
        _ends(way): way
        for thing, way in ways
        if not thing.live and thing.keys & lost and _ends(way) not in stay
    }
    return Retention(tuple(kept), verdicts, tuple(gone.values()), tuple(broken))


def _ends(way: Gone) -> tuple[str, int, int | None]:
    return way.event.lineage, way.event.version, way.base_version


def reasons_to_keep(
    held: Held, config: RetentionConfig, known: Mapping[int, WeightVersion]
) -> dict[int, list[str]]:
    """Version -> why it is kept; versions of one lineage."""
    newest = max(known)
    replayed = _replayed_from(known)
    found: dict[int, list[str]] = {}
    for version, event in sorted(known.items()):
        channel = held.promoted.get((event.lineage, version))
        reasons = [
            reason
            for holds, reason in (
                (version > newest - config.keep_last, f"one of the newest {config.keep_last}"),
                (version % config.keep_every == 0, f"one in {config.keep_every} is kept for good"),
                (
                    replayed is not None and version >= replayed,
                    f"the newest checkpoint is of version {replayed}",
                ),
                (channel is not None, f"channel {channel} was promoted to it"),
                (event.state_digest in held.served, "a replica serves it"),
                (version in held.pinned, "asked for"),
            )
            if holds
        ]
        if reasons:
            found[version] = reasons
    return found


def _replayed_from(known: Mapping[int, WeightVersion]) -> int | None:
    """The checkpoint that a trainer starts from now: the newest one that leads to the newest version. A revert to a version
    without one goes on from the checkpoint before that, which newer ones of versions that were given up do not replace."""
    event = known.get(max(known))
    while event is not None and event.checkpoint is None:
        event = known.get(event.version - 1 if event.reverts_to is None else event.reverts_to)
    return None if event is None else event.version


def _by_lineage(events: Iterable[WeightVersion]) -> dict[str, list[WeightVersion]]:
    found: defaultdict[str, list[WeightVersion]] = defaultdict(list)
    for event in events:
        found[event.lineage].append(event)
    return dict(found)


def _kept(
    census: Census,
    config: RetentionConfig,
    known: dict[int, WeightVersion],
    links: Sequence[WeightLink],
) -> list[Kept]:
    kept: list[Kept] = []
    # Forwards: whoever holds a slice goes no other way, and a version should not hang on later ones.
    ways = Ways(known, links)

    def forwards(version: int) -> Iterator[PathStep]:
        return (step for step in ways.into(version) if not step.backwards)

    for version, reasons in reasons_to_keep(census.held, config, known).items():
        path = cheapest(forwards, None, version)
        kept.append(Kept(known[version], tuple(reasons), None if path is None else tuple(path)))
    return kept


def _unreadable(census: Census, present: AbstractSet[str], kept: Kept) -> Iterator[str]:
    """Why a version that is kept cannot be read."""
    where = f"version {kept.event.version} of lineage {kept.event.lineage} is kept and cannot be read"
    if kept.path is None:
        yield f"{where}: no way leads to it"
    for step in kept.path or ():
        missing = sorted(_keys_of(census, step) - present)
        if missing:
            yield f"{where}: {len(missing)} objects of {step} are missing, first {missing[0]}"
        elif _claim_of(step) is not None and not census.inside.get(_claim_of(step) or ""):
            yield f"{where}: the manifest of {step} cannot be read"


def _names(
    census: Census,
    config: RetentionConfig,
    known: dict[int, WeightVersion],
    links: Sequence[WeightLink],
    kept: Sequence[Kept],
    *,
    keep_all: bool,
) -> list[_Named]:
    """Everything of a lineage that names objects, and whether it is kept."""
    newest = max(known)
    window = range(newest - config.keep_last + 1, newest + 1)
    needed: dict[StepKey, str] = {}
    for one in kept:
        for step in one.path or ():
            needed.setdefault(
                step.key, f"on the way to version {one.event.version}, kept as {one.reasons[0]}"
            )
    reasons = {one.event.version: one.reasons[0] for one in kept}
    named: list[_Named] = []
    seen: set[tuple[StepKey, frozenset[str]]] = (
        set()
    )  # two links between two versions may be of other objects
    for step in Ways(known, links):
        keys = _keys_of(census, step)
        if step.kind == "same" or (step.key, keys) in seen:  # backwards reads what forwards reads
            continue
        seen.add((step.key, keys))
        source = step.source
        why = needed.get(step.key, "")
        if not why and source.version in window and (step.full or source.base_version in window):
            why = f"between the newest {config.keep_last} versions"
        if keep_all:
            why = why or "a kept version of its lineage cannot be read"
        base = None if step.full else source.base_version
        title = f"anchor {source.version}" if step.full else f"{step.kind} {base}>{source.version}"
        named.append(
            _Named(f"{title} of lineage {source.lineage}", keys, why, Gone(known[source.version], base))
        )
    for version, event in known.items():
        why = reasons.get(version, "") or ("a kept version of its lineage cannot be read" if keep_all else "")
        title = f"version {version} of lineage {event.lineage}"
        named.append(_Named(f"manifest of {title}", frozenset({event.manifest.key}), why, None))
        if event.checkpoint is not None:
            key = event.checkpoint.key
            keys = frozenset({key}) | census.inside.get(key, frozenset())
            named.append(_Named(f"checkpoint of {title}", keys, why, None))
    named += _gone_already(census, known, links)
    return named


def _gone_already(
    census: Census, known: dict[int, WeightVersion], links: Sequence[WeightLink]
) -> list[_Named]:
    """What ways name that the log says are gone: a collector that was stopped left it."""
    named: list[_Named] = []
    shards: defaultdict[tuple[int, int | None], set[str]] = defaultdict(set)
    for link in links:
        shards[link.version, link.base_version].update(o.key for o in link.objects)
    for link in links:
        if link.kind != "gone" or link.version not in known:
            continue
        event, base = known[link.version], link.base_version
        claim = event.anchor if base is None else event.manifest
        own = base is None or base == event.base_version
        keys = set() if claim is None or not own else {claim.key} | census.inside.get(claim.key, frozenset())
        keys |= {o.key for o in event.objects} if own and base is not None else set()
        keys |= shards[link.version, base]
        title = f"what is gone from {'nothing' if base is None else base} to {link.version} of lineage {link.lineage}"
        named.append(_Named(title, frozenset(keys), "", None))
    return named


def _keys_of(census: Census, step: PathStep) -> frozenset[str]:
    source = step.source
    if isinstance(source, WeightLink):
        return frozenset(o.key for o in source.objects)
    if step.kind == "same":
        return frozenset()
    if step.full:
        claim = anchor_claim(source)
        return (
            frozenset()
            if claim is None
            else frozenset({claim.key}) | census.inside.get(claim.key, frozenset())
        )
    listed = {o.key for o in source.objects} or census.inside.get(source.manifest.key, frozenset())
    return frozenset({source.manifest.key}) | listed


def _claim_of(step: PathStep) -> str | None:
    """Key of the manifest without which the step's objects are not known; None = the event names them."""
    source = step.source
    if isinstance(source, WeightLink) or step.kind == "same":
        return None
    if step.full:
        claim = anchor_claim(source)
        return None if claim is None else claim.key
    return None if source.objects or source.kind == "empty" else source.manifest.key


def _verdict(
    census: Census,
    config: RetentionConfig,
    info: ObjectInfo,
    live: str | None,
    dead: Sequence[_Named],
    now_us: int,
) -> Verdict:
    if live is not None:
        return Verdict(info, "live", live)
    age_us = now_us - info.modified_us
    if age_us < config.grace_us:
        return Verdict(info, "young", f"nothing kept names it, but it is only {age_us / 3.6e9:.1f} h old")
    folder = folder_of(info.key)
    if folder in census.foreign:
        return Verdict(
            info,
            "unproved",
            f"{folder} has objects of lineages that this log does not know: another log may name it",
        )
    if dead:
        names = "; ".join(sorted({thing.title for thing in dead}))
        return Verdict(info, "expired", f"named only by what is not kept: {names}")
    if info.key.startswith("routing/") and info.modified_us < census.traces_from_us:
        return Verdict(
            info, "unproved", "older than what the log has of routing traces: an archive may name it"
        )
    return Verdict(info, "orphan", f"nothing in the log names it, and it is {age_us / 3.6e9:.1f} h old")


def folder_of(key: str) -> str:
    """The first two parts of a key: `weights/<model>`, `checkpoints/<lineage>`, `routing/<model>`."""
    return "/".join(key.split("/")[:2])
