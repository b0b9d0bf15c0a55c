"""What a demo reads from a run's topics and writes into them itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollwire.ops.settings import RunSettings, flattened
from rollwire.schemas.errors import ConfigError, Refused
from rollwire.schemas.records import Event, Notice, TrainStep
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.scan import scan


def events(log: Log, topics: Sequence[str]) -> Iterator[Event]:
    """All events of some topics. What does not decode is passed over: it has its dead letter, and the ledger counts it."""
    for record in scan(log, topics):
        try:
            yield decode_record(record)
        except Refused:
            continue


def check_steps(log: Log, settings: RunSettings) -> None:
    """Raises `ConfigError` where the run is already past the steps that are asked for."""
    taken = [
        e.step
        for e in events(log, ("train-steps",))
        if isinstance(e, TrainStep) and e.lineage == settings.lineage
    ]
    if max(taken, default=0) > settings.steps:
        raise ConfigError(
            f"the run has taken {max(taken)} steps already: go on with --steps {max(taken) + 1} or more"
        )


def announce(log: Log, settings: RunSettings) -> None:
    """Writes the settings into `notices`: whoever reads the run's history finds there what it was told."""
    now_us = SystemClock().now_us()
    notice = Notice(
        model=settings.model,
        name="settings",
        severity="info",
        text=f"run of lineage {settings.lineage} up to step {settings.steps}",
        attributes=dict(flattened(settings)),
        at_us=now_us,
    )
    writer = log.writer()
    try:
        writer.write([outgoing(notice, source="rollwire/demo", time_us=now_us)])
    finally:
        writer.close()
