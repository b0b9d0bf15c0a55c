"""Takes a lineage back: a new, higher version with the weights of an older one, and the trainer restored to it.

    made = revert(RevertRun(log, store, "rollwire.", "policy", lineage, to=120, by="ann", why="reward hacking"))

It is one transaction under the trainer's own transactional id (law 3): the step, the version, the consumer group's offsets
and a notice. So the trainer that runs is fenced: it commits nothing any more, ends, and its next start goes on from the
new version. Everything is prepared before it is fenced, and what cannot be done is refused before that. Fleets follow to
the new version as to any other: its delta leads there from the newest one.

`Reverting` goes through it turn by turn, as `rollwire.consumers.trainer.session.Session` does through training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, Literal, NamedTuple

import msgspec
import structlog

from rollwire.consumers.trainer import books
from rollwire.consumers.trainer.checkpoint_store import CarriedCheckpoint, renew_checkpoint
from rollwire.consumers.trainer.commit import Committer, Taken
from rollwire.consumers.trainer.history import History, read_history
from rollwire.consumers.trainer.reversion import (
    Reversion,
    check_restorable,
    plan_reversion,
    revert_notice,
    revert_step,
    trained_partitions,
)
from rollwire.consumers.weights.links import read_links
from rollwire.consumers.weights.paths import delta_step, plan_path
from rollwire.consumers.weights.publisher import PublisherConfig
from rollwire.consumers.weights.reader import Loaded, load_path
from rollwire.consumers.weights.snapshot import Held, SnapshotWriter
from rollwire.kernels.digest import StateDigest
from rollwire.schemas.errors import (
    DeadlineExceeded,
    Fenced,
    ObjectMissing,
    OffsetLost,
    WeightError,
)
from rollwire.schemas.records import TrainStep, WeightLink, WeightVersion
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.store import ObjectStore
from rollwire.streams.seams.work import Threads, Work

_log = structlog.get_logger()
_READ_S: Final = 60.0
_PUBLISH_S: Final = 120.0
_COMMIT_S: Final = 60.0

Turn = Literal["moved", "waiting", "done"]


class RevertRun(NamedTuple):
    """What a revert is made with. `prefix` and `name` give the trainer's transactional id and consumer group."""

    log: Log
    store: ObjectStore
    prefix: str
    model: str
    lineage: str
    to: int
    by: str
    why: str = ""
    name: str = "trainer"
    publisher: PublisherConfig = PublisherConfig()
    clock: Clock = SystemClock()
    work: Work = Threads()

    @property
    def group(self) -> str:
        return f"{self.prefix}{self.name}"


class _Prepared(NamedTuple):
    """The new version stands in the store; nothing is committed."""

    newest: int
    event: WeightVersion


class Reverting:
    """Use once: `turn` until it is done, then `close`. Any `RollwireError` ends it; nothing is reverted then, unless it says
    that an outcome is not known."""

    def __init__(self, run: RevertRun) -> None:
        self._run = run
        self._phase: Callable[[], Turn] = self._check
        self._committer: Committer | None = None
        self._target: Loaded | None = None
        self._prepared: _Prepared | None = None
        self._made: WeightVersion | None = None
        self._deadline_s = 0.0

    @property
    def result(self) -> WeightVersion | None:
        """The version that was made, once it is committed."""
        return self._made

    def turn(self) -> Turn:
        """One bounded piece. Raises `WeightError` for a version that cannot be gone back to, `Fenced` where a trainer was
        started meanwhile, and what reading weights, the store and the log raise."""
        return self._phase()

    def close(self) -> None:
        if self._committer is not None:
            self._committer.close()

    # -- the phases -------------------------------------------------------------------------------------------------

    def _check(self) -> Turn:
        """Whether it can be done at all, before anybody is disturbed."""
        history = self._history(running=True)
        partitions = trained_partitions(history)
        check_restorable(history, self._run.to, self._run.log.beginning_offsets(partitions))
        path = plan_path(history.versions, self._links(), None, self._run.to)
        self._target = load_path(self._run.store, path, None)
        self._renew(history)
        self._phase = self._prepare
        return "moved"

    def _prepare(self) -> Turn:
        self._prepared = self._write(self._history(running=True))
        self._phase = self._fence
        return "moved"

    def _fence(self) -> Turn:
        """From here on no trainer commits anything. One may have until now: then the newest version is another one."""
        run = self._run
        self._committer = Committer(
            run.log,
            run.log.transactional_writer(run.group),
            transactional_id=run.group,
            group=run.group,
            source=f"rollwire/revert/{run.model}",
            clock=run.clock,
            publish_deadline_s=_PUBLISH_S,
            commit_deadline_s=_COMMIT_S,
            committed=self._on_committed,
            logged=lambda version: self._history().version(version),
            books=books.start(),
            work=run.work,
        )
        self._phase = self._take
        return "moved"

    def _take(self) -> Turn:
        run, history = self._run, self._history()
        try:
            plan = self._plan(history)
        except OffsetLost:
            if self._history(running=True).versions[-1].version != history.versions[-1].version:
                raise Fenced("a trainer was started and went on meanwhile: nothing is reverted") from None
            raise
        if self._committer is None or self._prepared is None:
            raise WeightError("a revert was to be committed before it was prepared")
        if self._prepared.newest != plan.newest.version:
            self._prepared = self._write(history)
        now_us = run.clock.now_us()
        published: Future[WeightVersion] = Future()
        published.set_result(self._prepared.event)
        claim = plan.target.checkpoint
        carried = None
        if claim is not None:
            carried = CarriedCheckpoint(
                run.store, claim, lineage=run.lineage, version=plan.version, next_offsets=plan.next_offsets
            )
        self._committer.resume(plan.newest.version, plan.before)
        self._committer.take(
            Taken(
                plan.version,
                revert_step(plan, by=run.by, why=run.why, duration_ms=0.0),
                published,
                carried,
                plan.before,
                plan.after,
                (revert_notice(plan, by=run.by, why=run.why, at_us=now_us),),
            )
        )
        self._deadline_s = run.clock.monotonic_s() + _PUBLISH_S + _COMMIT_S
        self._phase = self._await
        return "moved"

    def _await(self) -> Turn:
        if self._committer is None or self._committer.wait_below(1, self._run.work.patience_s):
            return "done"
        if self._run.clock.monotonic_s() > self._deadline_s:
            raise DeadlineExceeded(
                f"a revert to version {self._run.to} was not committed within {_PUBLISH_S + _COMMIT_S:g} s; look at the "
                "versions before it is tried again"
            )
        return "waiting"

    # -- what they do -------------------------------------------------------------------------------------------------

    def _plan(self, history: History) -> Reversion:
        log = self._run.log
        partitions = trained_partitions(history)
        return plan_reversion(
            history,
            self._run.to,
            committed=log.committed(self._run.group, partitions),
            beginnings=log.beginning_offsets(partitions),
            ends=log.end_offsets(partitions),
        )

    def _write(self, history: History) -> _Prepared:
        """The new version's objects: a delta that leads from the newest version to the target's weights, read back; where the
        newest one cannot be read any more, the target's weights whole."""
        run, target = self._run, self._target
        newest = history.versions[-1]
        wanted = history.versions[run.to]
        version = newest.version + 1
        if target is None:
            raise WeightError("a revert was to be written before its target was read")
        config = run.publisher
        writer = SnapshotWriter(
            run.store,
            model=run.model,
            lineage=run.lineage,
            shard_bytes=config.shard_bytes,
            anchor_shard_bytes=config.anchor_shard_bytes,
            threads=config.threads,
            hf_config=None,
        )
        now_us = run.clock.now_us()
        try:
            path = plan_path(history.versions, self._links(), run.to, newest.version)
            base = load_path(run.store, path, target)
        except (WeightError, ObjectMissing) as unreadable:
            _log.warning("revert.newest_unreadable", version=newest.version, error=str(unreadable))
            event = writer.write_first(version, version, target.state, now_us).event
        else:
            held = Held(newest, base.state, base.digest)
            event = writer.write_next(
                held, version, version, target.state, now_us, anchor=False, kind="revert"
            ).event
            found = load_path(run.store, [delta_step(event)], base).state
            if StateDigest.of(found).hex != wanted.state_digest:
                raise WeightError(
                    f"the delta from version {newest.version} does not give version {wanted.version}"
                )
        event = msgspec.structs.replace(event, kind="revert", reverts_to=wanted.version)
        return _Prepared(newest.version, event)

    def _renew(self, history: History) -> None:
        """The checkpoint that the trainer will start from stands, and is as new to the collector as what is written now: no
        version that is kept may have named it for long. Raises `WeightError`."""
        run = self._run
        if all(version.checkpoint is None for version in history.versions):
            return
        source, _ = history.way_to(run.to)
        if source.checkpoint is None:
            return
        try:
            renew_checkpoint(run.store, source.checkpoint, lineage=run.lineage)
        except ObjectMissing as missing:
            kept = ", ".join(str(v.version) for v in history.versions[:-1] if v.checkpoint is not None)
            raise WeightError(
                f"no trainer can be brought to version {run.to}: the checkpoint of version {source.version} was deleted: "
                f"{missing}. Versions that were published with a checkpoint: {kept}"
            ) from missing

    def _on_committed(self, version: WeightVersion, _step: TrainStep | None) -> None:
        self._made = version
        _log.info("revert.committed", version=version.version, reverts_to=version.reverts_to)

    def _history(self, *, running: bool = False) -> History:
        run = self._run
        return read_history(
            run.log, run.model, run.lineage, deadline_s=_READ_S, clock=run.clock, running=running
        )

    def _links(self) -> Sequence[WeightLink]:
        run = self._run
        return read_links(run.log, run.lineage, run.model, patience_s=_READ_S, clock=run.clock)


def revert(run: RevertRun) -> WeightVersion:
    """Makes it, waiting as long as that takes. Raises as `Reverting.turn`, and `DeadlineExceeded` when it is not known
    whether it was committed."""
    reverting = Reverting(run)
    try:
        while reverting.turn() != "done":
            pass
    finally:
        reverting.close()
    if reverting.result is None:
        raise WeightError(f"nothing was made of the revert to version {run.to}")
    return reverting.result
