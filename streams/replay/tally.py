"""What a replay of the past found out: findings, counts, and of each topic two digests, of what was said and of what is said again. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import blake3
import msgspec

from rollwire.schemas.records import Event, Position
from rollwire.streams.dead_letter import Place
from rollwire.streams.findings import Finding, Kind, Report, at
from rollwire.streams.seams.log import Record, TopicPartition
from rollwire.streams.seams.scan import Lost

_LATE: Final = "late"
"""A repeat is late or in conflict, by what of the other input was read before it: no cut says that."""


Told = Callable[[str, int], None]
"""Is told on the way: the processor, and where in the history it stands."""


def untold(_processor: str, _at_us: int) -> None:
    """Nobody looks on."""


def moment(at_us: int) -> str:
    """A time of the history, as people read it."""
    return datetime.fromtimestamp(at_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


class Tally:
    """Of one processor, or of some of its partitions."""

    def __init__(self, processor: str) -> None:
        self.processor = processor
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self.checked: Counter[str] = Counter()
        self._hashers: dict[tuple[str, str, int], blake3.blake3] = {}

    def same(self, record: Record, was: Event, made: Event | None) -> bool:
        """Takes both into the digests; whether they are equal, bit by bit."""
        said, again = msgspec.msgpack.encode(was), b"" if made is None else msgspec.msgpack.encode(made)
        for side, data in (("recorded", said), ("replayed", again)):
            key = side, record.topic, record.partition
            hasher = self._hashers.setdefault(key, blake3.blake3())
            hasher.update(len(data).to_bytes(8, "little"))
            hasher.update(data)
        self.checked[record.topic] += 1
        return said == again

    def differs(self, record: Record, detail: str, kind: Kind = Kind.OUTCOME_DIFFERS) -> None:
        position = Position(topic=record.topic, partition=record.partition, offset=record.offset)
        self.findings.append(
            Finding(
                kind=kind,
                where=at(record.topic, record.partition, record.offset),
                detail=f"{self.processor}: {detail}",
                position=position,
            )
        )

    def lost(self, lost: Lost) -> None:
        """Offsets that neither log nor archive have."""
        partition, first, following = lost
        self.findings.append(
            Finding(
                kind=Kind.HISTORY_GAP,
                where=at(partition.topic, partition.partition, first),
                detail=f"{self.processor} cannot be replayed over offsets {first} to {following - 1}: restore them from a copy",
                position=Position(topic=partition.topic, partition=partition.partition, offset=first),
            )
        )

    def letters(
        self,
        recorded: Mapping[Place, tuple[str, Record]],
        replayed: Mapping[Place, str],
        read: Mapping[TopicPartition, tuple[int, int]],
        *,
        either_way: frozenset[str] = frozenset({_LATE}),
    ) -> None:
        """Compares refusals by the record that was refused; `read`: from where, and how far, the replay has read. Reasons `either_way`
        depend on the order in which inputs were read, which no cut says."""
        for place, (reason, record) in recorded.items():
            topic, partition, offset = place
            first, following = read.get(TopicPartition(topic, partition), (0, 0))
            if not first <= offset < following:
                continue
            self.checked["dead-letters"] += 1
            if place not in replayed and reason not in either_way:
                self.differs(
                    record, f"{at(*place)} was refused as {reason}, and is not refused when it is read again"
                )
        for place, reason in replayed.items():
            if place not in recorded and reason not in either_way:
                refused = Record(*place, 0, None, None, ())
                self.differs(refused, f"it is refused as {reason} when it is read again, and was not")

    def report(self) -> Report:
        digests: dict[str, str] = {}
        for side, topic in sorted({key[:2] for key in self._hashers}):
            whole = blake3.blake3()
            for (its, name, partition), hasher in sorted(self._hashers.items(), key=lambda item: item[0]):
                if (its, name) == (side, topic):
                    whole.update(partition.to_bytes(8, "little"))
                    whole.update(hasher.digest())
            digests[f"{self.processor}.{topic}.{side}"] = whole.hexdigest()
        return Report(
            command="replay",
            findings=tuple(self.findings),
            checked=dict(self.checked),
            notes=tuple(self.notes),
            digests=digests,
        )


def difference(was: Event, made: Event | None) -> str:
    """The first place where two events differ, in words."""
    if made is None:
        return "it does not follow from its cut"
    if type(was) is not type(made):
        return f"it was a {type(was).__name__}, and is a {type(made).__name__} when it is decided again"
    where, before, after = _first("", was, made)
    return f"{where} was {str(before)[:80]}, and is {str(after)[:80]} when it is decided again"


def _first(where: str, was: Any, made: Any) -> tuple[str, Any, Any]:
    if isinstance(was, msgspec.Struct) and type(was) is type(made):
        for name in was.__struct_fields__:
            if getattr(was, name) != getattr(made, name):
                return _first(f"{where}.{name}".removeprefix("."), getattr(was, name), getattr(made, name))
    if isinstance(was, tuple) and isinstance(made, tuple) and len(was) == len(made):
        for index, (one, other) in enumerate(zip(was, made, strict=True)):
            if one != other:
                return _first(f"{where}[{index}]", one, other)
    return where, was, made
