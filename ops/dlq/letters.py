"""Reads the dead letters and what became of them; which of them are meant; what a table says. No value is kept."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from rollwire.ops.moments import moment_of
from rollwire.schemas.catalogue import topic_named
from rollwire.schemas.codec import schema_for
from rollwire.schemas.errors import ConfigError, Refused
from rollwire.schemas.reasons import REASONS
from rollwire.schemas.records import DeadLetter, Position
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.log import Log, Record
from rollwire.streams.seams.scan import scan
from rollwire.streams.settlement import Action, LetterAt, Settlement, replay_count, settlement_of

TOPIC: Final = "dead-letters"
MARKS: Final = "notices"
State = Literal["pending", "replayed", "dropped"]
STATES: Final[tuple[State, ...]] = ("pending", "replayed", "dropped")
_SPAN: Final = re.compile(r"(\d+)(s|m|h|d)")
_UNIT_US: Final = {"s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000, "d": 86_400_000_000}


class Letter(NamedTuple):
    """A dead letter without its payload."""

    at: LetterAt
    id: str  # its ce_id: `<refused_by>/<topic>/<partition>/<offset>`
    source: Position
    key: bytes | None
    value_bytes: int | None  # None = a null value
    reason: str
    detail: str
    refused_by: str
    refused_us: int
    replays: int  # how often its event had been replayed when it was refused
    marks: tuple[Settlement, ...]  # oldest first

    @property
    def state(self) -> State:
        return self.marks[-1].action if self.marks else "pending"

    @property
    def replayed(self) -> int:
        """How often its event has been replayed by now."""
        return self.replays + sum(done.action == "replayed" for done in self.marks)


class Letters(NamedTuple):
    """What stands in `dead-letters`. `foreign`: records there that are no dead letters."""

    letters: tuple[Letter, ...]
    foreign: int


class Where(NamedTuple):
    """Which letters are meant; what is not given is not asked. `partition` and `offset` are the source's."""

    reasons: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()
    partition: int | None = None
    offset: int | None = None
    since_us: int | None = None
    until_us: int | None = None
    refused_by: str | None = None
    key: bytes | None = None
    names: tuple[str, ...] = ()  # ids or positions, `partition:offset`
    states: tuple[State, ...] = ()


class Row(NamedTuple):
    """Letters of one reason and source topic."""

    reason: str
    topic: str
    counts: Mapping[State, int]
    oldest_us: int
    newest_us: int


def letter_of(record: Record, event: DeadLetter) -> Letter:
    headers = tuple((header.key, header.value) for header in event.headers)
    return Letter(
        at=LetterAt(record.partition, record.offset),
        id=schema_for(DeadLetter).id_of(event),
        source=event.source,
        key=event.key,
        value_bytes=None if event.value is None else len(event.value),
        reason=event.reason,
        detail=event.detail,
        refused_by=event.refused_by,
        refused_us=event.refused_us,
        replays=replay_count(headers),
        marks=(),
    )


def events(log: Log) -> Iterator[tuple[Record, DeadLetter | None]]:
    """Every record of `dead-letters`, opened; None where it is no dead letter."""
    for record in scan(log, [TOPIC]):
        try:
            event = decode_record(record)
        except Refused:
            event = None
        yield record, event if isinstance(event, DeadLetter) else None


def read_marks(log: Log, *, hidden: bool = False) -> dict[LetterAt, tuple[Settlement, ...]]:
    """All marks by letter, oldest first. `hidden`: those too that stand behind an open transaction of somebody else."""
    found: dict[LetterAt, list[Settlement]] = defaultdict(list)
    for record in scan(log, [MARKS], hidden=hidden):
        try:
            done = settlement_of(decode_record(record))
        except Refused:
            continue
        if done is not None:
            for at in done.letters:
                found[at].append(done)
    return {at: tuple(marks) for at, marks in found.items()}


def read_letters(log: Log) -> Letters:
    """All dead letters and their marks. The letters come first: a mark read later cannot miss its letter."""
    letters: list[Letter] = []
    foreign = 0
    for record, event in events(log):
        if event is None:
            foreign += 1
        else:
            letters.append(letter_of(record, event))
    marks = read_marks(log)
    return Letters(tuple(one._replace(marks=marks.get(one.at, ())) for one in letters), foreign)


def fits(letter: Letter, where: Where) -> bool:
    """Whether a letter is meant."""
    return (
        (not where.reasons or letter.reason in where.reasons)
        and (not where.topics or letter.source.topic in where.topics)
        and where.partition in (None, letter.source.partition)
        and where.offset in (None, letter.source.offset)
        and (where.since_us is None or letter.refused_us >= where.since_us)
        and (where.until_us is None or letter.refused_us < where.until_us)
        and where.refused_by in (None, letter.refused_by)
        and (where.key is None or letter.key == where.key)
        and (not where.names or letter.id in where.names or str(letter.at) in where.names)
        and (not where.states or letter.state in where.states)
    )


def check(where: Where) -> None:
    """Raises `ConfigError` for what can match nothing: a word that is misspelt, a span of time that is none."""
    for reason in where.reasons:
        if reason not in REASONS:
            raise ConfigError(f"{reason!r} is no reason code; docs/topics.md lists them")
    for topic in where.topics:
        topic_named(topic)
    if where.since_us is not None and where.until_us is not None and where.since_us >= where.until_us:
        raise ConfigError("--since is not before --until")


def table(letters: Iterable[Letter]) -> list[Row]:
    """One row a reason and source topic, the most frequent first."""
    groups: dict[tuple[str, str], list[Letter]] = defaultdict(list)
    for letter in letters:
        groups[letter.reason, letter.source.topic].append(letter)
    rows = [_row(reason, topic, members) for (reason, topic), members in groups.items()]
    return sorted(rows, key=lambda row: (-sum(row.counts.values()), row.reason, row.topic))


def _row(reason: str, topic: str, members: Sequence[Letter]) -> Row:
    counts: dict[State, int] = dict.fromkeys(STATES, 0)
    for letter in members:
        counts[letter.state] += 1
    times = [letter.refused_us for letter in members]
    return Row(reason, topic, counts, min(times), max(times))


def parse_time(text: str, now_us: int) -> int:
    """A moment: RFC 3339 (without a zone: UTC), or so long ago: 90s, 15m, 2h, 3d. Raises `ConfigError`."""
    if (span := _SPAN.fullmatch(text)) is not None:
        return now_us - int(span[1]) * _UNIT_US[span[2]]
    return round(moment_of(text, also=", or 90s, 15m, 2h, 3d ago").timestamp() * 1_000_000)


def parse_key(text: str) -> bytes:
    """A key: text, or `hex:` and its bytes. Raises `ConfigError`."""
    if not text.startswith("hex:"):
        return text.encode()
    try:
        return bytes.fromhex(text[4:])
    except ValueError:
        raise ConfigError(f"{text!r} is no hex") from None


def past(action: Action, count: int) -> str:
    """`12 dead letters replayed`."""
    return f"{count:,} dead letter{'' if count == 1 else 's'} {action}"
