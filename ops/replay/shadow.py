"""The topics that a replay writes: made like the others, empty when it begins, never those that it reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollwire.ops.broker import Broker
from rollwire.ops.history import open_history
from rollwire.ops.topics import apply_topics, list_topics
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import ConfigError
from rollwire.schemas.records import Notice
from rollwire.streams.emit import outgoing
from rollwire.streams.replay.diff import NOTICE
from rollwire.streams.replay.shares import Logs
from rollwire.streams.replay.whatif import WhatIf
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.places import partitions_of

_INPUTS: Final = ("rewards", "groups", "group-fates")  # that one part of a replay reads of another


@dataclass(frozen=True, slots=True)
class LiveLogs:
    """Opens a history and its shadow, in whatever process it is called in."""

    dir: Path
    bootstrap: str | None
    prefix: str | None
    schema_registry: str | None
    into: str

    @contextmanager
    def __call__(self) -> Iterator[Logs]:
        with (
            open_history(
                "replay",
                dir=self.dir,
                bootstrap=self.bootstrap,
                prefix=self.prefix,
                schema_registry=self.schema_registry,
            ) as past,
            Broker(past.at.bootstrap, self.into).log("replay-shadow") as shadow,
        ):
            yield Logs(past.log, shadow)


def make_shadow(bootstrap: str, source: str, into: str, history: Log) -> None:
    """Creates the shadow topics under `into`. Raises `ConfigError` where they are the source's, or hold something, or have
    other partition counts than the history."""
    check_prefix(source, into)
    apply_topics(bootstrap, into)
    counts = {state.name.removeprefix(into): state.partitions for state in list_topics(bootstrap, into)}
    other = [name for name in _INPUTS if history.partitions(name) != counts[name]]
    if other:
        raise ConfigError(
            f"{other[0]} has {history.partitions(other[0])} partitions in the history and {counts[other[0]]} under {into!r}: "
            "groups would meet in other partitions"
        )
    with Broker(bootstrap, into).log("replay-shadow") as shadow:
        held = [name for name in TOPICS if _holds(shadow, name)]
    if held:
        raise ConfigError(f"{into}{held[0]} holds records already: replay into a prefix of its own")


def check_prefix(source: str, into: str) -> None:
    """Raises `ConfigError` for a prefix that is the history's, or could be taken for it."""
    if into == source:
        raise ConfigError(f"--into {into!r} is the history itself: name another prefix")
    if not into or into.startswith(source) or source.startswith(into):
        raise ConfigError(
            f"--into {into!r} and the history's prefix {source!r} begin alike: topics of one would be taken for the other's"
        )


def _holds(log: Log, topic: str) -> bool:
    partitions = partitions_of(log, [topic])
    begins = log.beginning_offsets(partitions)
    return any(end > begins[partition] for partition, end in log.written_offsets(partitions).items())


def announce_replay(log: Log, what: WhatIf, source: str, changes: Sequence[str]) -> None:
    """Says in the shadow's `notices` what it is."""
    now_us = SystemClock().now_us()
    window = what.window
    notice = Notice(
        model=what.line.model if what.line is not None else "policy",
        name=NOTICE,
        severity="info",
        text=f"a replay of {', '.join(what.processors)} over the history of {source}",
        attributes={
            "processors": ",".join(what.processors),
            "source": source,
            "from_us": str(window.from_us),
            "to_us": str(window.to_us),
            "changes": " ".join(changes),
        },
        at_us=now_us,
    )
    writer = log.writer()
    try:
        writer.write([outgoing(notice, source="rollwire/replay", time_us=now_us)])
    finally:
        writer.close()
