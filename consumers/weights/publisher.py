"""Publishes versions in the background, in order, while the trainer computes on.

    publish(n, tensors) -> Future -> the trainer's transaction commits the event -> committed(n)

`publish` copies the weights into memory of its own, which is all that the trainer's thread does; `submit` takes over a
state that the caller gives away. Comparing, encoding and putting are background work.

A version is visible only through its committed event: until then it is bytes in a bucket. The base of a delta is the
version submitted before it; that one's bytes stood in the store first, and its event is committed first. If version n
cannot be written, n+1 fails too (it would rest on nothing), and the trainer restarts from its last commit (law 3).

While the store or the commits are slow, `publish` and `submit` wait, and `waiting_for` says for what. A store that is
away is tried again for `store_patience_s`, so that a version outlives an outage.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Final, Literal, NamedTuple, Protocol

import structlog

from rollwire.consumers.weights.buffers import BufferPool, Source
from rollwire.consumers.weights.link_builder import LinkBuilder
from rollwire.consumers.weights.manifest import MadeFrom
from rollwire.consumers.weights.publisher_config import PublisherConfig
from rollwire.consumers.weights.snapshot import Held, SnapshotWriter
from rollwire.consumers.weights.sources import NamedTensors, sources_of
from rollwire.kernels.digest import StateDigest
from rollwire.kernels.tensors import State
from rollwire.schemas.errors import DeadlineExceeded, DigestMismatch, StoreUnavailable, WeightError
from rollwire.schemas.records import WeightVersion
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.store import ObjectStore
from rollwire.streams.seams.work import Task, Threads, Work

__all__ = ["PublisherConfig", "SnapshotPublisher", "VersionWriter", "Waiting"]

_log = structlog.get_logger()
_WARN_S: Final = 1.0  # a wait that takes longer is told
_RETRY_S: Final = 0.5  # the first pause while the store is away; doubles
_RETRY_MAX_S: Final = 10.0


class Waiting(NamedTuple):
    """What later versions wait for."""

    version: int  # the oldest one that is not committed
    on: Literal["store", "commit"]  # its objects do not stand yet | its transaction is not committed
    seconds: float  # so far
    trouble: str  # the store's last error, "" where there was none

    def __str__(self) -> str:
        if self.on == "commit":
            return f"version {self.version} is stored, its commit is awaited since {self.seconds:.1f} s"
        trouble = f"; last error: {self.trouble}" if self.trouble else ""
        return f"version {self.version} is being stored since {self.seconds:.1f} s{trouble}"


class _Item:
    """A submitted version that is not committed yet."""

    def __init__(
        self, version: int, step: int, state: State, made_from: MadeFrom | None, now_s: float
    ) -> None:
        self.version = version
        self.step = step
        self.made_from = made_from
        self.state = state
        self.since_s = now_s  # submitted, then stored
        self.trouble = ""  # why the store did not take it the last time
        self.failures = 0  # in a row
        self.troubled_s = 0.0  # when they began
        self.not_before_s = now_s
        self.future: Future[WeightVersion] = Future()
        self.future.set_running_or_notify_cancel()  # only `discard_from` takes a version back
        self.held: Held | None = None  # set when its objects stand in the store


class VersionWriter(Protocol):
    """Puts one version into the store. `SnapshotWriter` holds whole states, `adapters.sharded_writer` a rank's parts."""

    def write_first(self, version: int, step: int, state: State, published_us: int) -> Held: ...

    def write_next(
        self,
        base: Held,
        version: int,
        step: int,
        state: State,
        published_us: int,
        *,
        anchor: bool,
        made_from: MadeFrom | None = None,
    ) -> Held: ...


class SnapshotPublisher:
    """Thread-safe; its background work is one task of `work`, a thread by default. States that are handed in belong to the
    publisher and are never written to."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        model: str,
        lineage: str,
        config: PublisherConfig | None = None,
        hf_config: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
        work: Work | None = None,
        writer: VersionWriter | None = None,
        links: LinkBuilder | None = None,
    ) -> None:
        self._config = config or PublisherConfig()
        self._work = work or Threads()
        self._clock = clock or SystemClock()
        self._writer: VersionWriter = writer or SnapshotWriter(
            store,
            model=model,
            lineage=lineage,
            shard_bytes=self._config.shard_bytes,
            anchor_shard_bytes=self._config.anchor_shard_bytes,
            threads=self._config.threads,
            hf_config=hf_config,
            coder=self._config.coder,
            puts=self._config.puts,
        )
        self._model = model
        self._lineage = lineage
        self._change = threading.Condition()
        self._committed: Held | None = None
        self._items: list[_Item] = []  # in order of versions
        self._failed: tuple[int, BaseException] | None = None
        self._closed = False
        # The base, the open ones, one taken back in its turn, and the pair that a way back is made from.
        pair = 2 if links is not None and self._config.coder == "context" else 0
        self._pool = BufferPool(self._config.max_uncommitted + 2 + pair)
        self._links = links
        if links is not None:
            links.bind(self._is_storing, self._release)
        self._storing = False  # a turn reads states
        self._retired: list[State] = []  # to be given back to the pool after that turn
        self._worker = self._work.start(
            Task("snapshot-publisher", self._change, self._due, self._turn, self._broke)
        )

    def publish(
        self,
        version: int,
        named_tensors: NamedTensors,
        *,
        step: int | None = None,
        made_from: MadeFrom | None = None,
    ) -> Future[WeightVersion]:
        """Copies the weights and returns; the caller may go on changing them. Then as `submit`.

        `named_tensors`: tensors of ours, numpy arrays or torch tensors by name, with the names and in the layout of the
        published checkpoint. `step` is the trainer's step of this version, by default `version`. The copy goes into pooled
        memory (page-locked where the tensors are on a GPU): the first calls allocate it.

        Raises `StateMismatch` for what is no tensor, beside what `submit` raises.
        """
        sources = sources_of(named_tensors)
        failed = self._admit(version, copies=True)
        if failed is not None:
            return failed
        state = self._pool.fill(sources)
        return self._take(version, version if step is None else step, state, made_from)

    def submit(
        self, version: int, step: int, state: State, made_from: MadeFrom | None = None
    ) -> Future[WeightVersion]:
        """Takes over `state`; returns at once unless `max_uncommitted` versions wait for their commit. `made_from` goes into
        the manifest of a version that is no lineage's first.

        The future's event is not committed yet. The first version of a lineage becomes an anchor, later ones deltas.
        Raises `WeightError` for a version out of order or after `close`, `DeadlineExceeded` while nothing commits.
        """
        failed = self._admit(version, copies=False)
        return self._take(version, step, state, made_from) if failed is None else failed

    def waiting_for(self) -> Waiting | None:
        """What the oldest open version waits for; None where all are committed."""
        with self._change:
            return self._waiting()

    @property
    def buffer_bytes(self) -> int:
        """Memory held for copies."""
        return self._pool.nbytes

    def _waiting(self) -> Waiting | None:
        if not self._items:
            return None
        item = self._items[0]
        seconds = self._clock.monotonic_s() - item.since_s
        return Waiting(item.version, "commit" if item.held else "store", seconds, item.trouble)

    def _admit(self, version: int, *, copies: bool) -> Future[WeightVersion] | None:
        """Waits for a place; a failed future where an earlier version failed."""

        def admits() -> bool:
            return (
                self._closed
                or self._failed is not None
                or (len(self._items) < self._config.max_uncommitted and (self._pool.has_room or not copies))
            )

        with self._change:
            last = self._last_version()
            if self._failed is None and last is not None and version != last + 1:
                raise WeightError(f"version {version} submitted after {last}: versions go up by one")
            patience_s = self._config.submit_timeout_s
            room = self._work.wait(self._change, admits, min(_WARN_S, patience_s))
            if not room and patience_s > _WARN_S:
                waiting = self._waiting()
                _log.warning(
                    "weights.backpressure",
                    version=version,
                    reason="buffers" if waiting is None else waiting.on,
                    waits_for=str(waiting),
                )
                room = self._work.wait(self._change, admits, patience_s - _WARN_S)
            if self._closed:
                raise WeightError(f"version {version} submitted to a publisher that was closed")
            if not room:
                open_ = [f"{i.version} ({'stored' if i.held else 'being stored'})" for i in self._items]
                raise DeadlineExceeded(
                    f"version {version} waited {patience_s:g} s: versions {', '.join(open_)} "
                    f"are not committed, and at most {self._config.max_uncommitted} may be: {self._waiting()}"
                )
            if self._failed is not None:
                future: Future[WeightVersion] = Future()
                future.set_exception(_consequence(version, *self._failed))
                return future
            return None

    def _take(
        self, version: int, step: int, state: State, made_from: MadeFrom | None
    ) -> Future[WeightVersion]:
        with self._change:
            item = _Item(version, step, state, made_from, self._clock.monotonic_s())
            if self._failed is not None or self._closed:  # while it was copied
                cause = self._failed or (version, WeightError("the publisher was closed"))
                item.future.set_exception(_consequence(version, *cause))
                self._retire(state)
                return item.future
            last = self._last_version()
            if last is not None and version != last + 1:  # somebody else submitted, or took back, meanwhile
                self._retire(state)
                raise WeightError(f"version {version} submitted after {last}: versions go up by one")
            self._items.append(item)
            self._change.notify_all()
            return item.future

    def stored(self, version: int, timeout_s: float) -> None:
        """Waits until the objects of `version` stand. Raises what stopped it, `DeadlineExceeded`, and `WeightError` for a
        version that is not open."""
        with self._change:
            future = next((item.future for item in self._items if item.version == version), None)
            if future is None and self._failed is not None:
                raise _consequence(version, *self._failed)
        if future is None:
            raise WeightError(f"version {version} is not open")
        try:
            future.result(timeout_s)
        except TimeoutError as error:
            raise DeadlineExceeded(f"version {version} was not stored within {timeout_s:g} s") from error

    def committed(self, version: int) -> None:
        """The event of `version` is committed: it is the base to fall back to, and its place is free."""
        with self._change:
            if not self._items or self._items[0].version != version or self._items[0].held is None:
                raise WeightError(f"version {version} is not the next one to commit")
            held = self._items.pop(0).held
            superseded, self._committed = self._committed, held
            kept = self._links is not None and held is not None and self._links.committed(held, superseded)
            if superseded is not None and not kept:
                self._retire(superseded.state)
            self._change.notify_all()

    def discard_from(self, version: int) -> None:
        """Takes back `version` and everything after it; the next submit is `version` again. What was stored of them
        are orphans, for the collector."""
        with self._change:
            if self._committed is not None and version <= self._committed.event.version:
                raise WeightError(f"version {version} is committed and cannot be discarded")
            dropped = [item for item in self._items if item.version >= version]
            self._items = [item for item in self._items if item.version < version]
            for item in dropped:
                self._retire(item.state)
                if not item.future.done():
                    item.future.set_exception(WeightError(f"version {item.version} was discarded"))
            if self._failed is not None and self._failed[0] >= version:
                self._failed = None
            self._change.notify_all()

    def copy(self, sources: Mapping[str, Source]) -> State:
        """A copy in pooled memory, to be submitted next. For trainers whose tensors are not all in one process."""
        return self._pool.fill(sources)

    def resume(self, event: WeightVersion, state: State, digest: StateDigest | None = None) -> None:
        """After a restart: `event` is the last committed version, `state` its weights (owned by the publisher now).
        Of parts, `digest` is the whole state's.

        Raises `DigestMismatch` where the state is not that version's, `WeightError` for another lineage or while
        versions are open.
        """
        if (event.model, event.lineage) != (self._model, self._lineage):
            raise WeightError(
                f"version {event.version} is of {event.model}/{event.lineage}, not {self._model}/{self._lineage}"
            )
        if digest is None:
            digest = StateDigest.of(state)
        else:
            digest.check(state)
        if digest.hex != event.state_digest:
            raise DigestMismatch(
                f"version {event.version} is {event.state_digest[:16]}, the restored state {digest.hex[:16]}"
            )
        with self._change:
            if self._items:
                raise WeightError("versions are open: discard them before resuming")
            superseded, self._committed = self._committed, Held(event, state, digest)
            if superseded is not None:
                self._retire(superseded.state)
            self._failed = None
            self._change.notify_all()

    def close(self, timeout_s: float = 10.0) -> None:
        """Takes back what is not stored yet and ends the worker. Raises `DeadlineExceeded` while an upload hangs."""
        with self._change:
            self._closed = True
            for item in self._items:
                if not item.future.done():
                    item.future.set_exception(
                        WeightError(f"version {item.version}: the publisher was closed")
                    )
                self._retire(item.state)
            self._items = []
            self._change.notify_all()
        began_s = self._clock.monotonic_s()
        ended = self._worker.stop(timeout_s)
        if self._links is not None:
            self._links.close(max(0.1, timeout_s - (self._clock.monotonic_s() - began_s)))
        if not ended:
            raise DeadlineExceeded(f"an upload has not ended within {timeout_s:g} s of closing")

    def _last_version(self) -> int | None:
        if self._items:
            return self._items[-1].version
        return None if self._committed is None else self._committed.event.version

    def _next_item(self) -> tuple[_Item, Held | None] | None:
        base = self._committed
        for item in self._items:
            if item.held is None:
                return item, base
            base = item.held
        return None

    def _is_storing(self) -> bool:
        """Asked without the lock, by the builder of links: what it sees may be old by a moment."""
        return self._storing or any(item.held is None for item in tuple(self._items))

    def _release(self, state: State) -> None:
        with self._change:
            self._retire(state)
            self._change.notify_all()

    def _retire(self, state: State) -> None:
        """Nothing will need `state` again; a turn that runs may still read it."""
        if self._storing:
            self._retired.append(state)
        else:
            self._pool.give_back(state)

    def _due(self) -> float | None:
        following = None if self._closed or self._failed is not None else self._next_item()
        return None if following is None else max(0.0, following[0].not_before_s - self._clock.monotonic_s())

    def _turn(self) -> None:
        """Stores the next version."""
        with self._change:
            following = self._next_item()
            self._storing = following is not None
        if following is None:
            return
        item, base = following
        try:
            self._store(item, base)
        finally:
            with self._change:
                self._storing = False
                for state in self._retired:
                    self._pool.give_back(state)
                self._retired = []
                self._change.notify_all()
        while self._pool.grow():  # memory for what is published next, off the trainer's thread
            pass

    def _store(self, item: _Item, base: Held | None) -> None:
        try:
            held = self._write(item, base)
        except StoreUnavailable as error:
            self._later(item, error)
            return
        except Exception as error:  # noqa: BLE001  # the edge of the background: whoever waits for the future gets it
            self._fail(item, error)
            return
        with self._change:
            if item in self._items:
                item.held = held
                item.since_s, item.trouble = self._clock.monotonic_s(), ""
                item.future.set_result(held.event)

    def _later(self, item: _Item, error: StoreUnavailable) -> None:
        """The store is away: tried again while there is patience. What stands already is found there again."""
        now_s = self._clock.monotonic_s()
        with self._change:
            if not item.failures:
                item.troubled_s = now_s
            pause_s = min(_RETRY_S * 2.0 ** min(item.failures, 10), _RETRY_MAX_S)
            item.failures += 1
            item.trouble = str(error)
            item.not_before_s = now_s + pause_s
            patient = item.not_before_s - item.troubled_s <= self._config.store_patience_s
        if not patient:
            self._fail(item, error)
            return
        _log.warning("weights.store_away", version=item.version, error=str(error), again_in_s=pause_s)

    def _broke(self, error: BaseException) -> None:
        """What is no `Exception` (a panic below Python, say) ends the version too, not only the thread."""
        with self._change:
            following = self._next_item()
        if following is not None:
            self._fail(following[0], error)

    def _write(self, item: _Item, base: Held | None) -> Held:
        now_us = self._clock.now_us()
        if base is None:
            return self._writer.write_first(item.version, item.step, item.state, now_us)
        anchor = item.version % self._config.anchor_every == 0
        return self._writer.write_next(
            base, item.version, item.step, item.state, now_us, anchor=anchor, made_from=item.made_from
        )

    def _fail(self, item: _Item, error: BaseException) -> None:
        with self._change:
            if item not in self._items:
                return  # it was taken back meanwhile
            _log.error("weights.publish_failed", version=item.version, error=str(error))
            at = self._items.index(item)
            failed, self._items = self._items[at:], self._items[:at]
            for gone in failed:
                self._retire(gone.state)
            self._failed = (item.version, error)
            item.future.set_exception(error)
            for later in failed[1:]:
                later.future.set_exception(_consequence(later.version, item.version, error))
            self._change.notify_all()


def _consequence(version: int, failed: int, error: BaseException) -> WeightError:
    consequence = WeightError(f"version {version} is not published, since version {failed} failed: {error}")
    consequence.__cause__ = error
    return consequence
