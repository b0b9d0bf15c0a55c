"""`rollwire bench sync`: from the end of a step to the version that a replica serves, on a real broker and S3 server.

The trainer is a `VersionPublisher` that publishes by a copy; each replica is a process of its own that follows the lineage
into numpy arrays. Both sides' clocks are the machine's; what a replica did when is read from `fleet-status`, where every
replica reports it anyway. The first versions (the anchor, and what is compiled at first use) are not measured; neither is
a version with an anchor beside its delta, which takes as long as its anchor's upload. Weights: `sync_weights`.

Figures, for each size and number of replicas (`10mb_1`, `100mb_1`, `100mb_8`, `1gb_1`), medians over the versions, of several
replicas the last one's:

    sync.<case>.served_ms      step end to swapped
    sync.<case>.copy_ms        of it: the trainer is blocked while its weights are copied
    sync.<case>.store_ms       compare, encode, put shards and manifest
    sync.<case>.commit_ms      the transaction, and until the replica has the event
    sync.<case>.stage_ms       get manifest and shards, decode, verify
    sync.<case>.swap_ms        until the swap is done and proved: chunks are read back and their digests compared
    sync.<case>.pause_ms       of that: nobody may read the weights
    sync.<case>.put_get_ms     raw PUT + GET of the delta's bytes by the same client, in the same run
    sync.<case>.delta_pct      the delta's objects against the weights
    sync.<case>.changed_pct    elements that changed

    sync.blocked_ratio         the copy of 1 GB over one memcpy of it onto touched memory, in the same run
    sync.served_ms, sync.pause_ms   those of 100mb_1
    sync.slice_bytes_ratio     100 MB, four replicas that hold a quarter each: bytes the worst one fetched for a version over
                               a quarter of its delta
"""

from __future__ import annotations

import secrets
import statistics
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from rollwire.consumers.version_publisher import VersionPublisher
from rollwire.consumers.weights.publisher import PublisherConfig
from rollwire.kernels.delta.encode import Coder
from rollwire.ops.bench.sync_replica import Replica, Where, replicas
from rollwire.ops.bench.sync_weights import MovingWeights
from rollwire.ops.figures import Figure
from rollwire.schemas.errors import DeadlineExceeded
from rollwire.schemas.records import FleetStatus, WeightVersion
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.log import Reader, TopicPartition
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.store import ObjectStore

MODEL: Final = "bench-sync"
WARM: Final = 4  # versions that are not measured
SLICES: Final = 4
_WAIT_S: Final = 300.0
_MB: Final = 1_000_000


class Case(NamedTuple):
    name: str
    nbytes: int
    replicas: int
    versions: int  # measured
    sliced: bool = False

    @property
    def steps(self) -> int:
        return self.versions + WARM


class Sample(NamedTuple):
    """One version; times in ms."""

    served: float
    copy: float
    store: float
    commit: float
    stage: float
    swap: float
    pause: float
    put_get: float
    memcpy: float
    event: WeightVersion
    fetched: tuple[int, ...]  # bytes, of each replica


def cases(*, short: bool, runs: int) -> list[Case]:
    if short:
        return [Case("10mb_1", 10 * _MB, 1, 2), Case("slices", 10 * _MB, SLICES, 1, sliced=True)]
    return [
        Case("10mb_1", 10 * _MB, 1, runs),
        Case("100mb_1", 100 * _MB, 1, runs),
        Case("100mb_8", 100 * _MB, 8, max(3, runs // 2)),
        Case("1gb_1", 1_000 * _MB, 1, max(3, runs // 3)),
        Case("slices", 100 * _MB, SLICES, 3, sliced=True),
    ]


def bench_sync(
    where: Where, todo: Sequence[Case], report: Callable[[str], None], *, coder: Coder = "gap"
) -> list[Figure]:
    figures: list[Figure] = []
    for case in todo:
        samples = measure(where, case, report, coder)
        figures += slice_figures(samples) if case.sliced else case_figures(case, samples)
    return figures


def case_figures(case: Case, samples: Sequence[Sample]) -> list[Figure]:
    def median(of: Callable[[Sample], float]) -> float:
        return statistics.median(of(sample) for sample in samples)

    prefix = f"sync.{case.name}"
    raw = median(lambda s: s.put_get)
    served, pause = median(lambda s: s.served), median(lambda s: s.pause)
    blocked, memcpy = median(lambda s: s.copy), median(lambda s: s.memcpy)
    figures = [
        Figure(name=f"{prefix}.served_ms", value=served, unit="ms", baseline=raw),
        Figure(name=f"{prefix}.copy_ms", value=blocked, unit="ms", baseline=memcpy),
        Figure(name=f"{prefix}.store_ms", value=median(lambda s: s.store), unit="ms"),
        Figure(name=f"{prefix}.commit_ms", value=median(lambda s: s.commit), unit="ms"),
        Figure(name=f"{prefix}.stage_ms", value=median(lambda s: s.stage), unit="ms"),
        Figure(name=f"{prefix}.swap_ms", value=median(lambda s: s.swap), unit="ms"),
        Figure(name=f"{prefix}.pause_ms", value=pause, unit="ms"),
        Figure(name=f"{prefix}.put_get_ms", value=raw, unit="ms"),
        Figure(
            name=f"{prefix}.delta_pct",
            value=median(lambda s: 100 * s.event.stored_bytes / s.event.full_bytes),
            unit="%",
        ),
        Figure(
            name=f"{prefix}.changed_pct",
            value=median(lambda s: 100 * s.event.changed_elements / s.event.total_elements),
            unit="%",
        ),
    ]
    if case.name == "100mb_1":
        figures.append(Figure(name="sync.served_ms", value=served, unit="ms", baseline=raw))
        figures.append(Figure(name="sync.pause_ms", value=pause, unit="ms"))
    if case.name == "1gb_1":
        ratio = statistics.median(sample.copy / sample.memcpy for sample in samples)
        figures.append(Figure(name="sync.blocked_ratio", value=ratio, unit="x"))
    return figures


def slice_figures(samples: Sequence[Sample]) -> list[Figure]:
    worst = max(max(sample.fetched) / (sample.event.stored_bytes / SLICES) for sample in samples)
    return [Figure(name="sync.slice_bytes_ratio", value=worst, unit="x")]


def measure(where: Where, case: Case, report: Callable[[str], None], coder: Coder = "gap") -> list[Sample]:
    """Publishes `case.steps` versions, one after another, and gives the measured ones' samples."""
    lineage = str(uuid.uuid4())
    report(f"{case.name}: making weights")
    weights = MovingWeights(case.nbytes)
    target = np.zeros(weights.nbytes, np.uint8)
    followers = [
        Replica(f"{lineage[:8]}-{rank}", lineage, (rank, SLICES) if case.sliced else None)
        for rank in range(case.replicas)
    ]
    log, store = where.log("bench-sync"), where.store()
    config = PublisherConfig(anchor_every=1_000_000, coder=coder)
    name = f"bench-sync-{lineage}"
    publisher = VersionPublisher(
        log, store, model=MODEL, lineage=lineage, ranks=0, prefix=where.prefix, name=name, config=config
    )
    watch = _Watch(log, lineage, [one.name for one in followers])
    samples: list[Sample] = []
    try:
        report(f"{case.name}: version 0")
        publisher.start({name: t._replace(bits=t.bits.copy()) for name, t in weights.state.items()})
        with replicas(where, followers):
            watch.wait(0)
            for version in range(1, case.steps + 1):
                report(f"{case.name}: version {version}")
                weights.step()
                memcpy_ms = _memcpy_ms(weights, target)
                ended_us, began_s = time.time_ns() // 1_000, time.perf_counter()
                publisher.publish_alone(weights.state, version, copy=True)
                copy_ms = (time.perf_counter() - began_s) * 1e3
                seen = watch.wait(version)
                put_get_ms = _put_get_ms(store, seen.event)
                if version > WARM:
                    samples.append(_sample(seen, ended_us, copy_ms, put_get_ms, memcpy_ms))
    finally:
        watch.close()
        publisher.close(flush=False)
        log.close()
    return samples


class _Seen(NamedTuple):
    event: WeightVersion
    written_us: int  # when its transaction was begun
    staged: Mapping[str, FleetStatus]  # by replica
    swapped: Mapping[str, FleetStatus]


class _Watch:
    """Reads what became of a version from the topics."""

    def __init__(self, log: KafkaLog, lineage: str, names: Sequence[str]) -> None:
        self._lineage = lineage
        self._names = names
        self._events: dict[int, tuple[WeightVersion, int]] = {}
        self._staged: dict[int, dict[str, FleetStatus]] = {}
        self._swapped: dict[int, dict[str, FleetStatus]] = {}
        self._reader: Reader = log.reader()
        topics = ("weight-versions", "fleet-status")
        self._reader.assign(
            log.end_offsets([TopicPartition(t, p) for t in topics for p in range(log.partitions(t))])
        )

    def wait(self, version: int) -> _Seen:
        """Until every replica serves `version`. Raises `DeadlineExceeded`."""
        deadline_s = time.monotonic() + _WAIT_S
        while len(self._swapped.get(version, {})) < len(self._names) or version not in self._events:
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(
                    f"version {version} was not served by every replica within {_WAIT_S:g} s"
                )
            for record in self._reader.poll(1_000, 0.2):
                event = decode_record(record)
                if isinstance(event, WeightVersion) and event.lineage == self._lineage:
                    self._events[event.version] = event, record.timestamp_ms * 1_000
                elif isinstance(event, FleetStatus) and event.replica in self._names:
                    known = {"staged": self._staged, "swapped": self._swapped}.get(event.state)
                    if known is not None:
                        number = event.wanted_version if event.state == "staged" else event.version
                        known.setdefault(number, {})[event.replica] = event
        event, written_us = self._events[version]
        return _Seen(event, written_us, self._staged.get(version, {}), self._swapped[version])

    def close(self) -> None:
        self._reader.close()


def _sample(seen: _Seen, ended_us: int, copy_ms: float, put_get_ms: float, memcpy_ms: float) -> Sample:
    last = max(seen.swapped.values(), key=lambda status: status.at_us)
    staged = seen.staged[last.replica]
    staging_us = staged.at_us - staged.stage_ms * 1e3
    return Sample(
        served=(last.at_us - ended_us) / 1e3,
        copy=copy_ms,
        store=(seen.written_us - ended_us) / 1e3 - copy_ms,
        commit=(staging_us - seen.written_us) / 1e3,
        stage=staged.stage_ms,
        swap=(last.at_us - staged.at_us) / 1e3,
        pause=last.pause_ms,
        put_get=put_get_ms,
        memcpy=memcpy_ms,
        event=seen.event,
        fetched=tuple(status.fetched_bytes for status in seen.swapped.values()),
    )


def _memcpy_ms(weights: MovingWeights, target: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> float:
    """Onto touched memory, as the publisher's buffers are."""
    began_s = time.perf_counter()
    np.copyto(target, weights.flat)
    return (time.perf_counter() - began_s) * 1e3


def _put_get_ms(store: ObjectStore, event: WeightVersion) -> float:
    """What no weight plane can beat with this client and store: as many bytes, put and got back, in one object."""
    data = secrets.token_bytes(event.stored_bytes)
    key = f"bench/{secrets.token_hex(16)}"
    began_s = time.perf_counter()
    store.create(key, data)
    store.get(key)
    elapsed_ms = (time.perf_counter() - began_s) * 1e3
    store.delete(key)
    return elapsed_ms
