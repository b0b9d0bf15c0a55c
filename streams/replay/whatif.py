"""What-if replay: processors run over a history once more, with changed settings, into shadow topics.

    attribute ─ rewards ─▶ assemble-production ─┐
                           assemble ────────────┴─ groups ─▶ pack

One that is replayed reads what the ones before it wrote in the replay, where those are replayed too; everything else is the
history's. Inputs are merged by (broker timestamp, topic, partition, offset), and the records' times are the clock: so the outcome
does not depend on when, where, or by how many workers it is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

import blake3
import msgspec

from rollwire.schemas.errors import ConfigError
from rollwire.schemas.rules import Rules
from rollwire.streams.assemble_config import LIVE, SAMPLED, AssembleConfig, JoinConfig, ProductionConfig
from rollwire.streams.pack import PackConfig
from rollwire.streams.pack_step import NAME as PACK
from rollwire.streams.replay.audit import ATTRIBUTE
from rollwire.streams.replay.settings import Spoken
from rollwire.streams.replay.shares import Job, Logs, OpenLogs, shared
from rollwire.streams.replay.whatif_join import replay_attribution, replay_join
from rollwire.streams.replay.whatif_pack import Line, PackReplay
from rollwire.streams.replay.window import Made, Window
from rollwire.streams.seams.log import Log, Outgoing, Writer

ORDER: Final = (ATTRIBUTE, SAMPLED.name, LIVE.name, PACK)
_BATCH: Final = 500

Pace = Callable[[int], None]
"""Waits until a moment of the history may be shown."""


class WhatIf(NamedTuple):
    """What is replayed, and with which settings."""

    processors: tuple[str, ...]  # in the order of the flow
    assemble: AssembleConfig | None
    production: ProductionConfig | None
    pack: PackConfig | None
    line: Line | None  # whose plans are made
    rules: Rules | None  # None: those that the log says
    window: Window


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """What a what-if replay came to."""

    processors: tuple[str, ...]
    written: dict[str, int]  # topic -> records
    digests: dict[str, str]  # topic -> blake3 over its records: key, value, headers, in the order of writing
    waiting: int = 0  # groups that no plan took when it ended
    unplanned: int = 0  # versions of the history for which no plan was made


def planned_whatif(
    processors: Sequence[str],
    spoken: Spoken,
    window: Window,
    *,
    rules: Rules | None = None,
    lineage: str | None = None,
) -> WhatIf:
    """Settings as they were told last before the window's end, with the changes that `spoken` lays over them.

    Raises `ConfigError` for processors that are not replayed, for rules without `attribute`, and where the log does not say by
    which settings a processor decided.
    """
    unknown = [name for name in processors if name not in ORDER]
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is not replayed; there are: {', '.join(ORDER)}")
    if not processors:
        raise ConfigError(f"say what to replay: {', '.join(ORDER)}")
    if rules is not None and ATTRIBUTE not in processors:
        raise ConfigError("rules are what `attribute` judges by: replay it too")
    chosen = set(processors)
    joins = {SAMPLED.name, LIVE.name}
    if PACK in chosen and chosen & joins:
        # A plan has groups of both kinds: those of the other join come from the replay as well.
        chosen |= {name for name in joins if spoken.since(name)}
    at_us = window.to_us
    said = spoken.at(PACK, at_us, lineage) if PACK in chosen else None
    assemble = spoken.join(SAMPLED.name, spoken.at(SAMPLED.name, at_us)) if SAMPLED.name in chosen else None
    production = spoken.join(LIVE.name, spoken.at(LIVE.name, at_us)) if LIVE.name in chosen else None
    return WhatIf(
        processors=tuple(name for name in ORDER if name in chosen),
        assemble=assemble if isinstance(assemble, AssembleConfig) else None,
        production=production if isinstance(production, ProductionConfig) else None,
        pack=None if said is None else spoken.pack(said),
        line=None if said is None else Line(said.model, said.lineage),
        rules=rules,
        window=window,
    )


def replay(
    what: WhatIf,
    open_logs: OpenLogs,
    *,
    workers: int = 1,
    pace: Pace | None = None,
    seen: Callable[[Made], None] | None = None,
) -> Replayed:
    """Runs it, and writes into the shadow log what the processors say. `seen` is told of every record."""
    with open_logs() as logs:
        sink = _Sink(logs.shadow.writer(), pace, seen)
        try:
            for jobs in stages(what, logs.history):
                sink.write(shared(jobs, open_logs, workers))
            waiting = unplanned = 0
            if what.pack is not None and what.line is not None:
                joined = what.assemble is not None or what.production is not None
                packing = PackReplay(
                    logs.history, what.pack, what.line, what.window, groups=logs.shadow if joined else None
                )
                sink.write(packing.made())
                waiting, unplanned = packing.waiting, packing.unplanned
        finally:
            sink.close()
    return Replayed(
        processors=what.processors,
        written=dict(sorted(sink.counts.items())),
        digests={topic: hasher.hexdigest() for topic, hasher in sorted(sink.hashers.items())},
        waiting=waiting,
        unplanned=unplanned,
    )


def stages(what: WhatIf, history: Log) -> Iterator[list[Job]]:
    """Jobs that may run side by side, stage by stage: one a partition."""
    attributed = ATTRIBUTE in what.processors
    if attributed:
        yield [
            partial(_attribution, number, what.window, what.rules)
            for number in range(history.partitions("user-feedback"))
        ]
    joins: list[tuple[JoinConfig, bool]] = []
    if what.assemble is not None:
        joins.append((what.assemble, False))
    if what.production is not None:
        joins.append((what.production, attributed))
    if joins:
        yield [
            partial(_join, config, number, what.window, shadow)
            for config, shadow in joins
            for number in range(history.partitions(config.kind.joined[0]))
        ]


def _attribution(number: int, window: Window, rules: Rules | None, logs: Logs) -> Iterator[Made]:
    return replay_attribution(logs.history, number, window, rules)


def _join(config: JoinConfig, number: int, window: Window, shadow: bool, logs: Logs) -> Iterator[Made]:
    return replay_join(logs.history, config, number, window, rewards=logs.shadow if shadow else None)


class _Sink:
    """Writes in the order that things are given, and keeps digests of it."""

    def __init__(self, writer: Writer, pace: Pace | None, seen: Callable[[Made], None] | None) -> None:
        self._writer = writer
        self._pace = pace
        self._seen = seen
        self._batch: list[Outgoing] = []
        self.counts: Counter[str] = Counter()
        self.hashers: dict[str, blake3.blake3] = {}

    def write(self, made: Iterator[Made]) -> None:
        for one in made:
            if self._pace is not None:
                self._flush()
                self._pace(one.at_us)
            self._count(one.output)
            self._batch.append(one.output)
            if self._seen is not None:
                self._seen(one)
            if len(self._batch) >= _BATCH:
                self._flush()
        self._flush()

    def close(self) -> None:
        self._writer.close()

    def _flush(self) -> None:
        if self._batch:
            self._writer.write(self._batch)
            self._batch = []

    def _count(self, output: Outgoing) -> None:
        self.counts[output.topic] += 1
        hasher = self.hashers.setdefault(output.topic, blake3.blake3())
        hasher.update(msgspec.msgpack.encode((output.key, output.value, output.headers)))
