"""Links: deltas between any two published versions, as events of `weight-links`; and word of ways that are gone."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Literal

from rollwire.consumers.weights.keys import delta_key, sha256_hex
from rollwire.schemas.errors import Refused, StateMismatch
from rollwire.schemas.records import LinkObject, WeightLink, WeightVersion
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.places import exists
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store import ObjectStore

SPANS: Final = {4: 4, 16: 8, 32: 8, 64: 8}
"""How many versions a skip link leads over -> it ends at the multiples of this. Each is a chain of the shorter ones: four
of 4 make a 16, two of 16 a 32, two of 32 a 64, all ending where such links end. `rollwire bench catchup` says what they
save; all four on a grid of their own span would leave a follower between the places twice as much to fetch."""


class Links:
    """The links of every lineage, in the order of the log. Repeats are dropped."""

    def __init__(self, model: str | None = None) -> None:
        self._model = model
        self._links: dict[str, list[WeightLink]] = {}

    def add(self, link: WeightLink) -> bool:
        """Whether the link was news. Other models' are not; of the same event twice in a row the second is not."""
        if self._model is not None and link.model != self._model:
            return False
        known = self._links.setdefault(link.lineage, [])
        if link.kind != "gone" and link in known:
            # Linked again after it was gone, it is news.
            last = max(i for i, other in enumerate(known) if other == link)
            ends = (link.version, link.base_version)
            if not any(o.kind == "gone" and (o.version, o.base_version) == ends for o in known[last:]):
                return False
        known.append(link)
        return True

    def of(self, lineage: str | None) -> Sequence[WeightLink]:
        return self._links.get(lineage or "", [])


def read_links(
    log: Log,
    lineage: str,
    model: str | None = None,
    *,
    patience_s: float = 30.0,
    clock: Clock | None = None,
) -> list[WeightLink]:
    """The links of a lineage, in the order of the log: whoever plans a path needs them, if only to know what is gone.

    A stack that was provisioned before there were links has none. Raises what the log raises.
    """
    if not exists(log, "weight-links"):
        return []
    links = Links(model)
    for record in scan(log, ["weight-links"], patience_s=patience_s, clock=clock):
        try:
            event = decode_record(record)
        except Refused:  # names nothing; whoever consumes transactionally has it in dead-letters
            continue
        if isinstance(event, WeightLink):
            links.add(event)
    return list(links.of(lineage))


def skips_due(version: int, first: int) -> list[tuple[int, int]]:
    """The skip links (base, version) that end at `version`, shortest first; `first`: the lineage's first version."""
    return [
        (version - span, version)
        for span, every in SPANS.items()
        if version % every == 0 and version - span >= first
    ]


def put_shards(
    store: ObjectStore, model: str, shards: Sequence[bytes], heads: Sequence[int], *, puts: int = 1
) -> tuple[LinkObject, ...]:
    """Writes a delta's shards, `puts` of them at once; what names them comes after. `heads`: bytes of each one's header
    and table.

    Raises what the store raises, when no put is on its way any more.
    """

    def put(shard: bytes, head: int) -> LinkObject:
        sha256 = sha256_hex(shard)
        entry = LinkObject(key=delta_key(model, sha256), size=len(shard), sha256=sha256, head_bytes=head)
        store.create(entry.key, shard)
        return entry

    if min(puts, len(shards)) <= 1:
        return tuple(put(shard, head) for shard, head in zip(shards, heads, strict=True))
    with ThreadPoolExecutor(min(puts, len(shards)), thread_name_prefix="put") as pool:
        return tuple(pool.map(put, shards, heads))


def write_link(
    store: ObjectStore,
    base: WeightVersion,
    target: WeightVersion,
    shards: Sequence[bytes],
    heads: Sequence[int],
    *,
    coder: str,
    published_us: int,
) -> WeightLink:
    """Writes a delta from `base` to `target` and returns the event that makes it known.

    Raises `StateMismatch` for versions of two lineages or one version twice, and what the store raises.
    """
    if (base.model, base.lineage) != (target.model, target.lineage) or base.version == target.version:
        raise StateMismatch(
            f"no link leads from version {base.version} of {base.model}/{base.lineage} "
            f"to version {target.version} of {target.model}/{target.lineage}"
        )
    objects = put_shards(store, target.model, shards, heads)
    kind: Literal["skip", "inverse"] = "skip" if base.version < target.version else "inverse"
    return WeightLink(
        model=target.model,
        lineage=target.lineage,
        version=target.version,
        base_version=base.version,
        kind=kind,
        coder=coder,
        base_digest=base.state_digest,
        state_digest=target.state_digest,
        objects=objects,
        stored_bytes=sum(entry.size for entry in objects),
        published_us=published_us,
    )


def gone_link(event: WeightVersion, base_version: int | None, published_us: int) -> WeightLink:
    """Word that every way from `base_version` (None = the snapshot) to the event's version is about to be deleted."""
    return WeightLink(
        model=event.model,
        lineage=event.lineage,
        version=event.version,
        base_version=base_version,
        kind="gone",
        coder="",
        base_digest="",
        state_digest="",
        objects=(),
        stored_bytes=0,
        published_us=published_us,
    )
