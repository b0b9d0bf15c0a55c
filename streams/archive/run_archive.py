"""The archiver's round: seal what is new, copy what is sealed, let go of what is over its time; and the loop of rounds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

import structlog
from pydantic import BaseModel, ConfigDict, Field

from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import RollwireError
from rollwire.streams.archive.archiver import Copied, Thinned, archive_sealed
from rollwire.streams.archive.expiry import NOTHING_DUE, Due, delete_due, find_due
from rollwire.streams.archive.heads import Head, Signer, trusted_keys
from rollwire.streams.archive.held import held
from rollwire.streams.archive.sealed import NOTHING, Sealed, Trusted, sealed
from rollwire.streams.archive.sealer import EPOCH_RECORDS, PASSING, seal_epoch
from rollwire.streams.archive.stretches import listed
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.store import ObjectStore

_logger = structlog.get_logger("rollwire.archive")


class Watch(Protocol):
    """Is told how a round comes on."""

    def sealed(self, records: int) -> None:
        """So many more."""
        ...

    def planned(self, records: int) -> None:
        """So many are to be copied."""
        ...

    def copied(self, records: int) -> None:
        """So many more were looked at."""
        ...


class _Nobody:
    def sealed(self, records: int) -> None: ...
    def planned(self, records: int) -> None: ...
    def copied(self, records: int) -> None: ...


class ArchiveConfig(BaseModel):
    """How often the archiver seals, and how long it gathers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    every_s: float = Field(
        default=60.0, gt=0, description="seconds between two rounds; each seals what is new"
    )
    wait_s: float = Field(
        default=600.0,
        ge=0,
        description="a partition's new records are copied when the oldest of them is that many seconds old: so that objects are not small",
    )
    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65_535,
        description="port of /metrics on this machine; 0 = a free one, none: not served",
    )


class Round(NamedTuple):
    """What a round did."""

    sealed: Sealed  # everything that is sealed by now
    heads: tuple[Head, ...]  # that it made
    copied: Copied
    deleted: int  # stretches that were over their time


def archive_round(
    log: Log,
    store: ObjectStore,
    signer: Signer,
    *,
    name: str,
    clock: Clock,
    stop: threading.Event,
    known: Sealed = NOTHING,
    wait_s: float = 0.0,
    trusted: Trusted | None = None,
    max_records: int = EPOCH_RECORDS,
    watch: Watch | None = None,
    thinned: Thinned | None = None,
) -> Round:
    """One round. `log` is the live one; `known` what the round before found sealed; `trusted` whose heads are gone on from,
    by default the signer's own. `max_records`: of an epoch. `thinned`: as `archive_sealed` takes it, from round to round.

    Raises what log and store raise, and what a head may that is not one to go on from: what is done by then stays done.
    """
    trusted = trusted_keys(signer.public) if trusted is None else trusted
    watch = watch or _Nobody()
    known = sealed(store, name, trusted=trusted, known=known)
    over = find_due(store, name, known, clock.now_us(), trusted)
    heads: list[Head] = []

    def seal(gone: Due) -> None:
        """An epoch takes so many records: whoever comes to a long log seals it in several."""
        expired, before = gone.expired, known.head.archived if known.head else ()
        listing = [s for topic in TOPICS for those in listed(store, name, topic).values() for s in those]
        holds = held(before, listing, gone.stretches)
        while not stop.is_set() or expired:
            head = seal_epoch(
                log,
                store,
                signer,
                name=name,
                clock=clock,
                expired=expired,
                archived=holds,
                trusted=trusted,
                max_records=max_records,
                progress=watch.sealed,
            )
            if head is None:
                return
            heads.append(head)
            expired = ()

    seal(over)
    deleted = delete_due(store, over)  # a head names it by now: it is not missing without a reason
    known = sealed(store, name, trusted=trusted, known=known)
    copied = archive_sealed(
        log,
        store,
        name=name,
        sealed=known,
        clock=clock,
        stop=stop,
        wait_s=wait_s,
        planned=watch.planned,
        progress=watch.copied,
        thinned=thinned,
    )
    if copied.stretches:
        seal(NOTHING_DUE)  # what was copied just now nobody can take out unseen
        known = sealed(store, name, trusted=trusted, known=known)
    return Round(known, tuple(heads), copied, deleted)


def run_archive(
    log: Log,
    store: ObjectStore,
    signer: Signer,
    config: ArchiveConfig,
    *,
    name: str,
    clock: Clock,
    stop: threading.Event,
    trusted: Trusted | None = None,
    done: Callable[[Round], None] = lambda _: None,
) -> None:
    """Rounds until `stop`. A broker or a store that is away is waited for: what is not copied now is copied later, as long
    as the log has it. `done` is told of each round."""
    known = NOTHING
    thinned: Thinned = {}
    said: set[str] = set()
    while not stop.is_set():
        try:
            one = archive_round(
                log,
                store,
                signer,
                name=name,
                clock=clock,
                stop=stop,
                known=known,
                wait_s=config.wait_s,
                trusted=trusted,
                thinned=thinned,
            )
        except RollwireError as error:
            if not isinstance(error, PASSING):
                raise
            _logger.warning("archive.later", name=name, error=str(error))
        else:
            known = one.sealed
            _say(one, said)
            done(one)
        stop.wait(config.every_s)


def _say(one: Round, said: set[str]) -> None:
    """Each thing once: a round finds again what the one before it found."""
    for finding in one.copied.findings:
        if finding.where not in said:
            said.add(finding.where)
            _logger.error(
                "archive.finding", kind=finding.kind.value, where=finding.where, detail=finding.detail
            )
    for note in one.copied.notes:
        if note not in said:
            said.add(note)
            _logger.warning("archive.passed_over", what=note)
    for head in one.heads:
        _logger.info("archive.sealed", epoch=head.epoch, partitions=len(head.partitions))
    if one.deleted:
        _logger.info("archive.expired", stretches=one.deleted)
