"""Builds further ways between versions in the background, after they are committed: skip links and ways back.

Skip links are composed of gap deltas without any state, the longer ones of the shorter ones (`links.SPANS`). Of versions
whose deltas are context coded there are no gap deltas: where the two states are still held, one is made from them (it only
lives here), and with it the inverse link that leads back. A link is never waited for: a new version goes first, and when
too many versions wait, the oldest are passed over. Links are content-addressed and each is proved by whoever applies it,
so a builder that was fenced, or one that died halfway, does no harm.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, NamedTuple

import structlog

from rollwire.consumers.weights.link_chain import write_composed
from rollwire.consumers.weights.links import SPANS, Links, read_links, skips_due, write_link
from rollwire.consumers.weights.paths import known_versions
from rollwire.consumers.weights.publisher_config import PublisherConfig
from rollwire.consumers.weights.reader import read_object, shards_of
from rollwire.consumers.weights.snapshot import Held
from rollwire.kernels.delta.encode import Delta, encode_delta
from rollwire.kernels.tensors import State
from rollwire.schemas.errors import LogError, Refused, RollwireError, StoreUnavailable, TopicMismatch
from rollwire.schemas.records import LinkObject, WeightLink, WeightVersion
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.log import Log, Writer
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store import ObjectStore
from rollwire.streams.seams.work import Task, Threads, Work

TOPIC: Final = "weight-links"
MAX_BEHIND: Final = 16
"""Versions that wait; beyond it the oldest is passed over."""
_KEPT_BYTES: Final = 256 << 20  # of shards, so that they are not read back from the store
_YIELD_S: Final = 0.05  # until it is asked again whether a version is being stored
_CHAIN: Final = {4: 1, 16: 4, 32: 16, 64: 32}  # span -> span of what it is composed of
_log = structlog.get_logger()


def link_builder(
    log: Log,
    store: ObjectStore,
    config: PublisherConfig,
    *,
    model: str,
    lineage: str,
    clock: Clock | None = None,
    work: Work | None = None,
) -> LinkBuilder | None:
    """What a publisher with these settings takes as `links`."""
    if not config.links:
        return None
    return LinkBuilder(
        log,
        store,
        model=model,
        lineage=lineage,
        shard_bytes=config.shard_bytes,
        threads=config.threads,
        clock=clock,
        work=work,
    )


class Job(NamedTuple):
    """A version that was committed; with both states where the way back has to be made from them."""

    event: WeightVersion
    base: Held | None
    target: Held | None


class LinkBuilder:
    """`committed` is called by the publisher and never blocks; the work is one task of `work`. `release` gives the states of
    a job back; `busy` says that a version is on its way to the store, which goes first."""

    def __init__(
        self,
        log: Log,
        store: ObjectStore,
        *,
        model: str,
        lineage: str,
        shard_bytes: int,
        threads: int,
        clock: Clock | None = None,
        work: Work | None = None,
    ) -> None:
        self._events_log = log
        self._store = store
        self._model = model
        self._lineage = lineage
        self._shard_bytes = shard_bytes
        self._threads = threads
        self._clock = clock or SystemClock()
        self._work = work or Threads()
        self._change = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._busy: Callable[[], bool] = lambda: False
        self._release: Callable[[State], None] = lambda _: None
        self._closed = False
        self._pair: tuple[State, State] | None = None  # that a queued or running job compares
        self._owed: list[State] = []  # superseded meanwhile: given back with the pair
        # Of the task alone.
        self._writer: Writer | None = None
        self._versions: dict[int, WeightVersion] = {}
        self._links = Links(model)
        self._edges: dict[tuple[int, int], Sequence[LinkObject] | Sequence[bytes]] = {}
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._learnt = False
        self._worker = self._work.start(
            Task("weight-links", self._change, self._due, self._turn, self._broke)
        )

    def bind(self, busy: Callable[[], bool], release: Callable[[State], None]) -> None:
        self._busy, self._release = busy, release

    def committed(self, target: Held, base: Held | None) -> bool:
        """Takes note of a version. Whether it keeps the state of `base`, the version before it, until it calls `release`."""
        keeps = False
        with self._change:
            if self._closed:
                return False
            job = Job(target.event, None, None)
            if base is not None and self._pair is not None:
                if target.event.coder == "context":  # memory holds one pair of states
                    _log.warning("weights.way_back_passed_over", version=target.event.version)
                if self._pair[1] is base.state:
                    self._owed.append(base.state)
                    keeps = True
            elif base is not None and target.event.coder == "context":
                self._pair = base.state, target.state
                job = Job(target.event, base, target)
                keeps = True
            self._jobs.append(job)
            late = self._jobs.popleft() if len(self._jobs) > MAX_BEHIND else None
            self._change.notify_all()
        if late is not None:
            _log.warning("weights.links_passed_over", version=late.event.version, behind=MAX_BEHIND)
            self._let_go(late)
        return keeps

    @property
    def nbytes(self) -> int:
        """Of deltas that are held in memory. Asked between turns."""
        edges = sum(len(one) for edge in self._edges.values() for one in edge if isinstance(one, bytes))
        return edges + sum(len(one) for one in self._kept.values())

    def close(self, timeout_s: float) -> None:
        with self._change:
            self._closed = True
            jobs = [*self._jobs]
            self._jobs.clear()
            self._change.notify_all()
        for job in jobs:
            self._let_go(job)
        if self._worker.stop(timeout_s) and self._writer is not None:
            self._writer.close()
            self._writer = None

    def _let_go(self, job: Job) -> None:
        if job.base is None:
            return
        with self._change:  # never while the publisher's lock is asked for
            done, self._owed, self._pair = [job.base.state, *self._owed], [], None
        for state in done:
            self._release(state)

    def _due(self) -> float | None:
        if not self._jobs or self._closed:
            return None
        return _YIELD_S if self._busy() else 0.0

    def _turn(self) -> None:
        """The links that end at one version."""
        with self._change:
            job = self._jobs.popleft() if self._jobs else None
        if job is None:
            return
        try:
            self._build(job)
        except (LogError, StoreUnavailable) as error:
            # Not made now, and perhaps never: whatever is missing, there is a way without it.
            _log.warning("weights.link_not_built", version=job.event.version, error=str(error))
            self._drop_writer()
        except RollwireError as error:
            _log.error("weights.link_failed", version=job.event.version, error=str(error))
        finally:
            self._let_go(job)

    def _broke(self, error: BaseException) -> None:
        _log.error("weights.link_failed", error=repr(error))

    def _build(self, job: Job) -> None:
        event = job.event
        self._learn(event)
        self._note(event)
        made: list[WeightLink] = []
        if job.base is not None and job.target is not None:
            made.append(self._way_back(job.base, job.target))
        first = min(self._versions)
        for start, end in skips_due(event.version, first):
            link = self._skip(start, end)
            if link is not None:
                made.append(link)
        if made:
            self._write(made)
        self._forget(event.version)

    def _way_back(self, base: Held, target: Held) -> WeightLink:
        def delta(start: Held, end: Held, coder: Literal["gap", "context"]) -> Delta:
            return encode_delta(
                start.state,
                end.state,
                base=start.digest,
                result=end.digest,
                coder=coder,
                shard_bytes=self._shard_bytes,
                threads=self._threads,
            )

        back = delta(target, base, "context")
        there = delta(
            base, target, "gap"
        )  # what skip links are composed of; nobody reads it, so it is not stored
        self._edges[(base.event.version, target.event.version)] = there.shards
        return write_link(
            self._store,
            target.event,
            base.event,
            back.shards,
            back.heads,
            coder="context",
            published_us=self._clock.now_us(),
        )

    def _skip(self, start: int, end: int) -> WeightLink | None:
        """None where a part of it was passed over, or cannot be composed."""
        if (start, end) in self._edges:
            return None  # linked before a restart
        part = _CHAIN[end - start]
        pairs = [(at, at + part) for at in range(start, end, part)]
        if any(pair not in self._edges for pair in pairs):
            _log.info("weights.skip_passed_over", start=start, end=end)
            return None
        link, shards = write_composed(
            self._store,
            self._versions[start],
            self._versions[end],
            ([*self._shards(pair)] for pair in pairs),
            published_us=self._clock.now_us(),
            shard_bytes=self._shard_bytes,
            threads=self._threads,
        )
        self._edges[(start, end)] = link.objects
        for entry, shard in zip(link.objects, shards, strict=True):
            self._keep(entry.key, shard)
        return link

    def _shards(self, pair: tuple[int, int]) -> Iterator[bytes]:
        for entry in self._edges[pair]:
            if isinstance(entry, bytes):
                yield entry
                continue
            known = self._kept.get(entry.key)
            if known is None:
                known = read_object(self._store, entry.key, entry.size, entry.sha256)
                self._keep(entry.key, known)
            yield known

    def _keep(self, key: str, shard: bytes) -> None:
        self._kept[key] = shard
        while sum(len(one) for one in self._kept.values()) > _KEPT_BYTES:
            self._kept.popitem(last=False)

    def _write(self, made: Sequence[WeightLink]) -> None:
        if self._writer is None:
            self._writer = self._events_log.writer()
        source = f"rollwire/weights/{self._model}"
        self._writer.write([outgoing(link, source=source, time_us=link.published_us) for link in made])

    def _drop_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    # -- what is known ------------------------------------------------------------------------------------------------

    def _learn(self, event: WeightVersion) -> None:
        """What a builder before this one left: the versions and links of the lineage up to `event`."""
        if self._learnt:
            return
        found: list[WeightVersion] = []
        for record in scan(self._events_log, ["weight-versions"], clock=self._clock):
            try:
                one = decode_record(record)
            except Refused:
                continue
            if isinstance(one, WeightVersion) and (one.model, one.lineage) == (self._model, self._lineage):
                found.append(one)
        for one in known_versions(found).values():
            if one.version < event.version:
                self._note(one)
        try:
            self._events_log.partitions(TOPIC)
        except TopicMismatch:
            raise LogError(f"no topic {TOPIC!r}: create it with `rollwire topics apply`") from None
        for link in read_links(self._events_log, self._lineage):
            if link.base_version is None:
                continue
            if link.kind == "gone":
                self._edges.pop((link.base_version, link.version), None)
            elif link.kind == "skip" and link.coder == "gap":
                self._edges[(link.base_version, link.version)] = link.objects
        self._forget(event.version)
        self._learnt = True

    def _note(self, event: WeightVersion) -> None:
        self._versions[event.version] = event
        if event.base_version is not None and event.coder != "context":
            self._edges[(event.base_version, event.version)] = shards_of(self._store, event)

    def _forget(self, newest: int) -> None:
        """Nothing is composed of what ended longer ago than the longest span."""
        oldest = newest - max(SPANS)
        first = min(self._versions, default=newest)
        # What lies in memory alone is for the shortest spans, and those that end by now are made or passed over.
        made = newest // min(SPANS) * min(SPANS)
        self._edges = {
            pair: edge
            for pair, edge in self._edges.items()
            if pair[0] >= oldest and (pair[1] > made or not _in_memory(edge))
        }
        self._versions = {
            version: event
            for version, event in self._versions.items()
            if version >= oldest or version == first
        }


def _in_memory(edge: Sequence[LinkObject] | Sequence[bytes]) -> bool:
    return any(isinstance(one, bytes) for one in edge)
