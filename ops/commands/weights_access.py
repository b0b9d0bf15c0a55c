"""Which bucket, lineage and version the commands of `rollwire weights` mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from rollwire.consumers.weights.census import read_books
from rollwire.consumers.weights.paths import known_versions
from rollwire.consumers.weights.versions import Versions
from rollwire.schemas.errors import WeightError
from rollwire.schemas.records import WeightLink, WeightVersion
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.places import existing

Lineage = Annotated[
    str | None, Parameter(name="--lineage", help="Training run; by default the one started last.")
]
Bucket = Annotated[
    str | None, Parameter(name="--bucket", help="Bucket in the local stack's store; by default its own.")
]


def of_lineage(log: Log, lineage: str | None) -> tuple[list[WeightVersion], list[WeightLink]]:
    """The versions and links of one lineage; `None`: the one started last. Raises `WeightError` where there are none."""
    books = read_books(log, topics=existing(log, ("weight-versions", "weight-links")))
    versions = Versions(lineage)
    for event in books.events:
        versions.add(event)
    if versions.newest is None:
        raise WeightError(
            f"no version is published{f' of lineage {lineage}' if lineage else ' under this prefix'}"
        )
    return versions.events, [link for link in books.links if link.lineage == versions.lineage]


def chosen(events: Sequence[WeightVersion], version: int | None) -> WeightVersion:
    known = known_versions(events)
    wanted = max(known) if version is None else version
    if wanted not in known:
        raise WeightError(f"version {wanted} is not known in lineage {events[0].lineage}")
    return known[wanted]
