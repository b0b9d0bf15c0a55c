"""`rollwire bench streams`: assemble and pack on a real broker, against two bare consume-produce-commit loops in the same run.

Every run has topics of its own. The processes start on them (two for assemble, each with a thread for each of its partitions, one
for pack; the bare loops likewise), take over and are held before their first read, so that no start-up is measured and no
care that a restart takes. Then the topics are filled, and all get the word to go. A run lasts from there until a
read_committed reader has seen the last fate, which `pack` writes in the transaction of the last plan. Runs of the two sides
take turns; one of each is a warm-up; medians count. Groups of 16, every rollout rewarded, none with routing traces; `pack`
never waits for a trainer: version 0 is published and plans may run ahead of it without bound.

Figures (2kb: rollouts of about 2 KB, 100kb: of about 100 KB):

    streams.ratio_<size>                   throughput of assemble + pack, of the bare loops'
    streams.rollouts_per_s_<size>          rollouts a second through both; baseline: the bare loops
    streams.mb_per_s_<size>                bytes of rollouts and rewards a second, 10^6; baseline: the bare loops
    streams.assemble_cpu_us_<size>         CPU time of the process a rollout, threads of the client included; baseline: the bare loop
    streams.pack_cpu_us_<size>             the same
    streams.over_faust                     rollouts a second of one process of assemble, of a Faust worker's (`streams_faust`); 2 KB
    streams.assemble_rollouts_per_s_2kb    the two
    streams.latency_<p50|p99|max>_ms       a group complete to its microbatches readable, in an open loop at half the
                                           measured rate (`streams_latency`); 2 KB, plans of 48 groups
    streams.latency_rollouts_per_s         that rate
    streams.latency_groups, .._late_sends, .._latest_send_ms   groups measured; those sent 10 ms or more behind the timetable

With `--grow`, for 1, 2, 4 and 8 partitions, for 1, 2 and 4 processes of assemble on 4 partitions, and for rollouts of 50 to
12,200 tokens: `streams.grow.<what>_<count>.<rollouts_per_s|mb_per_s|assemble_cpu_us|pack_cpu_us>`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final, NamedTuple, Protocol

import msgspec
from confluent_kafka.admin import AdminClient

from rollwire.ops.bench.streams_bare import Bare
from rollwire.ops.bench.streams_faust import FaustWorker
from rollwire.ops.bench.streams_latency import WARM_S, Latency, measure
from rollwire.ops.bench.streams_load import MEMBERS, Generator, Load, anchor, balanced, fill, record_of
from rollwire.ops.bench.streams_worker import Crew, Work
from rollwire.ops.figures import Figure
from rollwire.ops.topics import apply_topics
from rollwire.schemas.catalogue import TOPICS, TopicSpec
from rollwire.schemas.codec import decode
from rollwire.schemas.errors import DeadlineExceeded
from rollwire.schemas.records import GroupFate
from rollwire.streams.assemble_config import AssembleConfig
from rollwire.streams.pack import PackConfig
from rollwire.streams.seams.log import Outgoing, Reader, TopicPartition
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan

_RUN_S: Final = 180.0
_SAMPLES: Final = 32
_UNBOUND: Final = 1_000_000

Report = Callable[[str], None]


class Size(NamedTuple):
    """One size of rollouts, and how they are packed."""

    load: Load
    groups_per_step: int
    token_budget: int
    ranks: int = 4

    @property
    def plans(self) -> int:
        return self.load.groups // self.groups_per_step

    @property
    def pack(self) -> PackConfig:
        return PackConfig(
            ranks=self.ranks,
            groups_per_step=self.groups_per_step,
            token_budget=self.token_budget,
            max_lag_versions=_UNBOUND,
            max_steps_ahead=_UNBOUND,
        )


def sizes(*, short: bool) -> tuple[Size, Size]:
    """About 2 KB and about 100 KB a rollout."""
    if short:
        return Size(Load("2kb", 200, 48), 8, 16_384), Size(Load("100kb", 12_200, 8), 4, 32_768)
    return Size(Load("2kb", 200, 3_840), 48, 16_384), Size(Load("100kb", 12_200, 128), 8, 32_768)


class Run(NamedTuple):
    """One measured run."""

    rollouts_per_s: float
    mb_per_s: float  # 10^6 bytes of rollouts and rewards
    cpu_us: tuple[float, ...]  # of each process, a rollout


class Bench:
    """Runs on one broker; each in topics of its own, which are deleted behind it."""

    def __init__(self, bootstrap: str, partitions: int, seed: int, report: Report) -> None:
        self.bootstrap = bootstrap
        self.partitions = tuple(range(partitions))
        self.seed = seed
        self.report = report
        self._admin = AdminClient({"bootstrap.servers": bootstrap, "broker.address.family": "v4"})

    def topics(self) -> tuple[KafkaLog, str]:
        prefix = f"bench-{uuid.uuid4().hex[:8]}."
        count = len(self.partitions)
        # Ranks have a partition each; all others are spread as asked.
        specs = {
            name: spec if name in ("packed-batches", "weight-versions") else _spread(spec, count)
            for name, spec in TOPICS.items()
        }
        apply_topics(self.bootstrap, prefix, topics=specs)
        return KafkaLog(self.bootstrap, prefix, client_id="bench"), prefix

    def drop(self, prefix: str) -> None:
        names = [name for name in self._admin.list_topics(timeout=30).topics if name.startswith(prefix)]
        for future in self._admin.delete_topics(names).values():
            future.result(30)

    def fill(self, log: KafkaLog, load: Load) -> int:
        """Bytes that were written."""
        now_us = time.time_ns() // 1_000
        writer = log.writer()
        try:
            generator = Generator(load, at_us=now_us, seed=self.seed)
            size = fill(writer, balanced(generator, load.groups, len(self.partitions)))
            writer.write([record_of(anchor(now_us), now_us)])
        finally:
            writer.close()
        return size

    def faust(self, load: Load) -> float:
        """Rollouts a second of the Faust worker, from its first tenth of groups to the last."""
        log, prefix = self.topics()
        try:
            self.fill(log, load)
            reader = log.reader()
            reader.assign({TopicPartition("groups", p): 0 for p in self.partitions})
            first = load.groups // 10
            with FaustWorker(self.bootstrap, prefix, len(self.partitions)) as worker:
                first = _count(reader, first, worker)
                began = time.monotonic()
                rest = _count(reader, load.groups - first, worker)
                took = time.monotonic() - began
            reader.close()
        finally:
            self.drop(prefix)
        return rest * MEMBERS / took

    def latency(self, size: Size, rate: float, seconds: float, workers: int) -> Latency:
        """Groups of `size` at `rate` rollouts a second for so long."""
        groups = round(rate / MEMBERS * (seconds + WARM_S))
        load = size.load._replace(groups=groups - groups % size.groups_per_step)
        log, prefix = self.topics()
        try:
            now_us = time.time_ns() // 1_000
            writer = log.writer()
            writer.write([record_of(anchor(now_us), now_us)])
            writer.close()
            with Crew(self.placed(ours(size, self.partitions, workers), prefix)) as crew:
                return measure(
                    log,
                    self.bootstrap,
                    prefix,
                    crew,
                    load,
                    rate=rate / MEMBERS,
                    ranks=size.ranks,
                    seed=self.seed,
                )
        finally:
            self.drop(prefix)

    def placed(self, works: Sequence[Work], prefix: str) -> list[Work]:
        return [work._replace(prefix=prefix, bootstrap=self.bootstrap) for work in works]

    def run(
        self,
        load: Load,
        works: Sequence[Work],
        look: Callable[[KafkaLog], None] = lambda _: None,
        *,
        until: str = "group-fates",
    ) -> Run:
        """Starts `works` on empty topics, fills those, times the work until `until` has a record for each group, and has
        a `look` at what was written."""
        log, prefix = self.topics()
        try:
            reader = log.reader()
            reader.assign({TopicPartition(until, p): 0 for p in self.partitions})
            with Crew(self.placed(works, prefix)) as crew:
                written = self.fill(log, load)
                began = crew.go()
                _count(reader, load.groups, crew)
                took = time.monotonic() - began
                cpu_s = crew.stop()
            reader.close()
            look(log)
        finally:
            self.drop(prefix)
        return Run(
            load.rollouts / took,
            written / took / 1e6,
            tuple(seconds / load.rollouts * 1e6 for seconds in cpu_s),
        )


class _Checked(Protocol):
    def check(self) -> None: ...


def _count(reader: Reader, wanted: int, processes: _Checked) -> int:
    """Returns when at least `wanted` records were read; how many."""
    deadline = time.monotonic() + _RUN_S
    seen = 0
    while seen < wanted:
        seen += len(reader.poll(5_000, 0.2))
        processes.check()
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{seen} of {wanted} records after {_RUN_S:g} s")
    return seen


def _spread(spec: TopicSpec, partitions: int) -> TopicSpec:
    return msgspec.structs.replace(spec, partitions=partitions)


def ours(size: Size, partitions: Sequence[int], workers: int = 1) -> list[Work]:
    """`workers` processes for assemble, each with its share of the partitions, and one for pack, the last of the list."""
    every = tuple(partitions)
    # The input of a whole run is written before it starts, so its groups have to stay open for longer than usual.
    config = AssembleConfig(group_deadline_s=1_800.0, late_horizon_s=3_600.0)
    return [
        *(Work("assemble", "", "", every[worker::workers], config) for worker in range(workers)),
        Work("pack", "", "", every, size.pack),
    ]


def bare(baseline: Bare, partitions: Sequence[int], workers: int = 1) -> list[Work]:
    """The same of the bare loops."""
    every = tuple(partitions)
    return [
        *(Work("bare-assemble", "", "", every[worker::workers], baseline) for worker in range(workers)),
        Work("bare-pack", "", "", every, baseline),
    ]


class Look:
    """What a run of ours left in its topics: the pattern of the bare loops, after proof that all was kept."""

    def __init__(self, size: Size, partitions: Sequence[int]) -> None:
        self._size = size
        self._partitions = partitions
        self.baseline: Bare | None = None

    def __call__(self, log: KafkaLog) -> None:
        size = self._size
        samples: dict[str, list[Outgoing]] = {}
        counts: dict[str, int] = {}
        transactions: dict[str, int] = {}
        for topic in ("groups", "groups-closed", "packed-batches", "group-fates"):
            kept: list[Outgoing] = []
            last: dict[int, int] = {}
            for number, record in enumerate(scan(log, [topic])):
                counts[topic] = number + 1
                last[record.partition] = last.get(record.partition, 0) + 1
                if len(kept) < _SAMPLES:
                    kept.append(Outgoing(topic, record.key, record.value, record.headers))
                if topic == "group-fates":
                    fate = decode(topic, record.value, record.headers)
                    if not isinstance(fate, GroupFate) or fate.fate != "kept":
                        raise ValueError(f"a group of the benchmark was not kept: {fate}")
            # What an offset counts beyond the records are the ends of transactions.
            ends = log.end_offsets([TopicPartition(topic, p) for p in last])
            transactions[topic] = sum(ends.values()) - counts[topic]
            samples[topic] = kept
        wanted = {
            "groups": size.load.groups,
            "groups-closed": size.load.groups,
            "group-fates": size.load.groups,
        }
        wanted["packed-batches"] = size.plans * size.ranks
        if counts != wanted:
            raise ValueError(f"the run wrote {counts}, not {wanted}")
        self.baseline = Bare(
            samples=samples,
            records=round(2 * size.load.rollouts / transactions["groups-closed"]),
            groups=size.groups_per_step,
            plans=round(size.plans * size.ranks / transactions["packed-batches"]),
            ranks=size.ranks,
        )


def ratio_figures(bench: Bench, size: Size, runs: int, workers: int = 1) -> list[Figure]:
    """`runs` runs of each side in turn, after one of each."""
    look = Look(size, bench.partitions)
    mine: list[Run] = []
    base: list[Run] = []
    for number in range(runs + 1):
        word = f"{size.load.name}: run {number} of {runs}" if number else f"{size.load.name}: warm-up"
        bench.report(f"{word}, assemble and pack")
        mine.append(bench.run(size.load, ours(size, bench.partitions, workers), look))
        if look.baseline is None:
            raise ValueError("a run was not looked at")
        bench.report(f"{word}, bare loops")
        base.append(bench.run(size.load, bare(look.baseline, bench.partitions, workers)))
    del mine[0], base[0]
    name = size.load.name
    rates = [median(run.rollouts_per_s for run in side) for side in (mine, base)]
    bytes_ = [median(run.mb_per_s for run in side) for side in (mine, base)]
    figures = [
        Figure(name=f"streams.ratio_{name}", value=rates[0] / rates[1], unit="of the bare loops"),
        Figure(name=f"streams.rollouts_per_s_{name}", value=rates[0], unit="1/s", baseline=rates[1]),
        Figure(name=f"streams.mb_per_s_{name}", value=bytes_[0], unit="MB/s", baseline=bytes_[1]),
    ]
    for place, role in ((slice(-1), "assemble"), (slice(-1, None), "pack")):
        cpu = [median(sum(run.cpu_us[place]) for run in side) for side in (mine, base)]
        figures.append(Figure(name=f"streams.{role}_cpu_us_{name}", value=cpu[0], unit="us", baseline=cpu[1]))
    return figures


def faust_figures(bench: Bench, size: Size, runs: int, *, groups: int) -> list[Figure]:
    """assemble alone against the Faust worker, in turn, after one run of each."""
    load = size.load._replace(groups=groups)
    mine: list[float] = []
    base: list[float] = []
    for number in range(runs + 1):
        word = f"over Faust: run {number} of {runs}" if number else "over Faust: warm-up"
        bench.report(f"{word}, assemble")
        run = bench.run(size.load, ours(size, bench.partitions)[:1], until="groups")
        mine.append(run.rollouts_per_s)
        bench.report(f"{word}, Faust")
        base.append(bench.faust(load))
    value, baseline = median(mine[1:]), median(base[1:])
    return [
        Figure(name="streams.over_faust", value=value / baseline, unit="of a Faust worker"),
        Figure(name="streams.assemble_rollouts_per_s_2kb", value=value, unit="1/s", baseline=baseline),
    ]


def latency_figures(
    bench: Bench, size: Size, max_rate: float, seconds: float, workers: int = 1
) -> list[Figure]:
    """At half of `max_rate` rollouts a second."""
    rate = max_rate / 2
    bench.report(f"latency at {rate:,.0f} rollouts/s, {seconds:g} s")
    found = bench.latency(size, rate, seconds, workers)
    return [
        Figure(name="streams.latency_p99_ms", value=found.p99_ms, unit="ms"),
        Figure(name="streams.latency_p50_ms", value=found.p50_ms, unit="ms"),
        Figure(name="streams.latency_max_ms", value=found.max_ms, unit="ms"),
        Figure(name="streams.latency_rollouts_per_s", value=rate, unit="1/s"),
        Figure(name="streams.latency_groups", value=found.groups, unit="groups"),
        Figure(name="streams.latency_late_sends", value=found.late, unit="groups"),
        Figure(name="streams.latency_latest_send_ms", value=found.latest_ms, unit="ms"),
    ]


def _growth(*, short: bool) -> list[tuple[str, Size, int, int]]:
    """Name, size, partitions and processes of assemble of every point."""
    small = sizes(short=short)[0]
    points = [(f"partitions_{count}", small, count, 1) for count in (1, 2, 4, 8)]
    points += [(f"workers_{count}", small, 4, count) for count in (1, 2, 4)]
    for tokens, groups in ((50, 1_920), (200, 1_920), (1_000, 960), (4_000, 240), (12_200, 96)):
        load = Load(f"{tokens}", tokens, 48 if short else groups)
        points.append(
            (f"tokens_{tokens}", small._replace(load=load, groups_per_step=8, token_budget=32_768), 4, 1)
        )
    return points


def grow_figures(bootstrap: str, runs: int, seed: int, *, short: bool, report: Report) -> list[Figure]:
    """Medians of `runs` runs of each point."""
    figures: list[Figure] = []
    for name, size, partitions, workers in _growth(short=short):
        bench = Bench(bootstrap, partitions, seed, report)
        report(f"growth: {name}")
        found = [bench.run(size.load, ours(size, bench.partitions, workers)) for _ in range(runs)]
        for word, unit, values in (
            ("rollouts_per_s", "1/s", [run.rollouts_per_s for run in found]),
            ("mb_per_s", "MB/s", [run.mb_per_s for run in found]),
            ("assemble_cpu_us", "us", [sum(run.cpu_us[:-1]) for run in found]),
            ("pack_cpu_us", "us", [run.cpu_us[-1] for run in found]),
        ):
            figures.append(Figure(name=f"streams.grow.{name}.{word}", value=median(values), unit=unit))
    return figures


def steps(runs: int, *, grow: bool) -> int:
    """How often `bench_streams` reports."""
    return 3 * 2 * (runs + 1) + 1 + (len(_growth(short=True)) if grow else 0)


def bench_streams(
    bootstrap: str,
    *,
    partitions: int = 4,
    workers: int = 2,
    runs: int = 5,
    seed: int = 0,
    short: bool = False,
    grow: bool = False,
    report: Report = lambda _: None,
) -> list[Figure]:
    """All figures. `report` is told what is done next, for people."""
    bench = Bench(bootstrap, partitions, seed, report)
    small, large = sizes(short=short)
    figures = ratio_figures(bench, small, runs, workers)
    rate = next(
        figure.value for figure in figures if figure.name == f"streams.rollouts_per_s_{small.load.name}"
    )
    figures += latency_figures(bench, small, rate, 3.0 if short else 20.0, workers)
    figures += ratio_figures(bench, large, runs, workers)
    figures += faust_figures(bench, small, runs, groups=40 if short else 120)
    return figures + (grow_figures(bootstrap, runs, seed, short=short, report=report) if grow else [])
