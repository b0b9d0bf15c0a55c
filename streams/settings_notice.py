"""Which settings a processor decides with, in the log: an audit replay decides with the same ones again. Pure but for `tell`.

A processor says its settings when it starts, before it decides anything, and only where they are not the ones it said last.
So the settings of a decision are those of the newest notice of its processor that is not younger than the decision's cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import blake3
from pydantic import BaseModel

from rollwire.schemas.errors import Refused
from rollwire.schemas.records import Notice
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.scan import scan

NAME: Final = "settings"
"""Name of the notices. One without the attribute `processor` is of a whole run."""

TOPIC: Final = "notices"


class Told(NamedTuple):
    """What one processor said of itself."""

    processor: str
    lineage: str
    code: str  # version of the package, and the commit where it is known
    digest: str  # blake3 hex of `config`
    config: str  # canonical JSON: sorted keys, no spaces
    at_us: int

    def same(self, other: Told) -> bool:
        """Whether both decide alike, as far as settings and code say."""
        return (self.lineage, self.code, self.digest) == (other.lineage, other.code, other.digest)


def told_of(
    processor: str,
    config: Mapping[str, BaseModel | Mapping[str, Any]],
    *,
    lineage: str,
    code: str,
    at_us: int,
) -> Told:
    """`config`: by section, as in a run's settings (`pack`, `policy`, ...)."""
    plain = {
        name: part.model_dump(mode="json") if isinstance(part, BaseModel) else dict(part)
        for name, part in config.items()
    }
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return Told(processor, lineage, code, blake3.blake3(text.encode()).hexdigest(), text, at_us)


def settings_notice(told: Told, *, model: str) -> Notice:
    """The event that says it."""
    return Notice(
        model=model,
        name=NAME,
        severity="info",
        text=f"{told.processor} starts with settings {told.digest[:12]}, code {told.code}",
        attributes={
            "processor": told.processor,
            "lineage": told.lineage,
            "code": told.code,
            "digest": told.digest,
            "config": told.config,
        },
        at_us=told.at_us,
    )


def told_in(notice: Notice) -> Told | None:
    """What a notice says of a processor's settings; None for every other notice, and for one whose digest is not its own."""
    said = notice.attributes
    if notice.name != NAME or "processor" not in said:
        return None
    config = said.get("config", "")
    if blake3.blake3(config.encode()).hexdigest() != said.get("digest"):
        return None
    return Told(
        said["processor"], said.get("lineage", ""), said.get("code", ""), said["digest"], config, notice.at_us
    )


def notices(log: Log) -> Iterable[Notice]:
    """All notices of a log, in order; what does not decode is its consumer's to refuse."""
    for record in scan(log, [TOPIC]):
        try:
            event = decode_record(record)
        except Refused:
            continue
        if isinstance(event, Notice):
            yield event


def tell(
    log: Log,
    processor: str,
    config: Mapping[str, BaseModel | Mapping[str, Any]],
    *,
    model: str,
    lineage: str,
    code: str,
    clock: Clock,
) -> bool:
    """Writes what `processor` decides with from now on; False where that is what it said last.

    Raises `LogError` and `DeadlineExceeded` while the broker is away.
    """
    now = told_of(processor, config, lineage=lineage, code=code, at_us=clock.now_us())
    last: Told | None = None
    for notice in notices(log):
        said = told_in(notice)
        if said is not None and said.processor == processor:
            last = said
    if last is not None and now.same(last):
        return False
    writer = log.writer()
    try:
        writer.write(
            [outgoing(settings_notice(now, model=model), source=f"rollwire/{processor}", time_us=now.at_us)]
        )
    finally:
        writer.close()
    return True
