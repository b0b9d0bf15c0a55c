"""Cells in which nobody dies and the store breaks its word: on the way up, and on the way down.

They need the real store and a proxy in front of it. What is published through it is right or fails by name and is tried
again; what is read through it is right or refused; the version that serves goes on serving.
"""

from __future__ import annotations

import time
from typing import Final, NamedTuple

from rollwire.ops.chaos import s3_proxy
from rollwire.ops.chaos.s3_proxy import Act, Matches, S3Proxy, requests
from rollwire.ops.chaos.weights.judge import (
    CellFailed,
    Reports,
    end_of,
    ended_well,
    judge_status,
    judge_versions,
)
from rollwire.ops.chaos.weights.lives import Access, MemoryLives, Task
from rollwire.ops.chaos.weights.matrix import Bench, commit_event, new_lineage, stored
from rollwire.ops.chaos.weights.roles import WAIT_S
from rollwire.ops.chaos.weights.states import LAST
from rollwire.schemas.errors import StoreUnfit
from rollwire.streams.seams.store import ObjectStore
from rollwire.streams.seams.store_s3 import S3Store

_FOLDERS: Final = ("deltas", "anchors", "manifests")


class Fault(NamedTuple):
    """`act` on the next `times` requests that match. `refused`: a replica may refuse a version meanwhile, for this."""

    name: str
    matches: Matches
    act: Act
    times: int = 1
    refused: str = ""


UP: Final[tuple[Fault, ...]] = (
    *(Fault(f"upload of {f} is cut", requests("PUT", f"/{f}/"), s3_proxy.cut_upload(100)) for f in _FOLDERS),
    *(
        Fault(f"reply to a put of {f} is lost", requests("PUT", f"/{f}/"), s3_proxy.lose_reply)
        for f in _FOLDERS
    ),
    *(
        Fault(
            f"409 to a put of {f}",
            requests("PUT", f"/{f}/"),
            s3_proxy.answer(409, "ConditionalRequestConflict"),
        )
        for f in _FOLDERS
    ),
    *(
        Fault(f"a bit of {f} flips on its way up", requests("PUT", f"/{f}/"), s3_proxy.damage_upload(50))
        for f in _FOLDERS
    ),
    Fault("500 for a while", lambda _: True, s3_proxy.answer(500, "InternalError"), 3),
    Fault("503 for longer than one put is tried", requests("PUT"), s3_proxy.answer(503, "SlowDown"), 12),
    Fault("a slow store", requests("PUT"), s3_proxy.slow(0.1), 20),
)
DOWN: Final[tuple[Fault, ...]] = (
    *(Fault(f"download of {f} is cut", requests("GET", f"/{f}/"), s3_proxy.cut_download(100)) for f in _FOLDERS),
    *(
        Fault(
            f"a bit of {f} flips on its way down", requests("GET", f"/{f}/"), s3_proxy.damage_download(50), 1, "DeltaCorrupt"
        )
        for f in _FOLDERS
    ),
    *(
        Fault(f"{f} are not there for a while", requests("GET", f"/{f}/"), s3_proxy.answer(404, "NoSuchKey"), 2, "ObjectMissing")
        for f in _FOLDERS
    ),
    Fault("500 for a while", lambda _: True, s3_proxy.answer(500, "InternalError"), 3),
    Fault("503 for longer than one get is tried", requests("GET"), s3_proxy.answer(503, "SlowDown"), 12),
    Fault("a slow store", requests("GET"), s3_proxy.slow(0.1), 20),
)  # fmt: skip


def up_cell(bench: Bench, proxy: S3Proxy, through: ObjectStore, fault: Fault) -> None:
    """Versions are published through the proxy. Raises `CellFailed`."""
    lineage = new_lineage()
    watcher = MemoryLives(bench.log, bench.store).start(Task("follow", lineage, LAST))
    proxy.clear()
    rule = proxy.rule(fault.matches, fault.act, times=fault.times)
    try:
        life = MemoryLives(bench.log, through).start(Task("publish", lineage, LAST))
        ended_well(end_of(life, "who publishes"), "who publishes")
        proxy.clear()
        _happened(rule, fault)
        judge_versions(bench.log, bench.store, lineage, complete=True)
        ended_well(end_of(watcher, "the replica beside it"), "the replica beside it")
    finally:
        watcher.kill()


def down_cell(bench: Bench, proxy: S3Proxy, through: ObjectStore, fault: Fault) -> None:
    """Versions are followed through the proxy, one after the other. Raises `CellFailed`."""
    lineage = new_lineage()
    events = stored(bench.store, lineage)
    writer, reports = bench.log.writer(), Reports(bench.log, lineage)
    proxy.clear()
    rule = proxy.rule(fault.matches, fault.act, times=fault.times)
    commit_event(writer, events[0])
    life = MemoryLives(bench.log, through).start(Task("follow", lineage, LAST))
    fed, deadline = 0, time.monotonic() + WAIT_S
    try:
        while (end := life.ended()) is None:
            for status in reports.poll():
                # Where the only way was refused, there is none until it is tried again.
                judge_status(status, *((fault.refused, "no way from") if fault.refused else ()))
                if status.state == "swapped" and status.version == fed < LAST:
                    fed += 1
                    commit_event(writer, events[fed])
            if time.monotonic() > deadline:
                raise CellFailed(f"version {fed} was not served within {WAIT_S:g} s")
        ended_well(end, "who follows")
        _happened(rule, fault)
        reports.drain()
        refusals = [status.reason for status in reports.all if status.state == "refused"]
        if fault.refused and not any(fault.refused in reason for reason in refusals):
            raise CellFailed(f"nothing was refused as {fault.refused}: {refusals}")
    finally:
        life.kill()
        reports.close()
        writer.close()


def unfit_cell(proxy: S3Proxy, access: Access, through: S3Store) -> None:
    """A store that ignores the condition is refused at the start. Raises `CellFailed`."""
    proxy.clear()
    act = s3_proxy.strip_condition(access.access_key or "", access.secret_key or "", access.region)
    proxy.rule(requests("PUT"), act, times=None)
    try:
        through.probe()
    except StoreUnfit:
        return
    finally:
        proxy.clear()
    raise CellFailed("the probe passed a store that ignores If-None-Match")


def _happened(rule: s3_proxy.Rule, fault: Fault) -> None:
    if not rule.hits:
        raise CellFailed(f"it never happened: {fault.name}")
