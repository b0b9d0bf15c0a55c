"""What became of a dead letter: the mark that settles it, and the record that replays it. Pure.

A mark is a `Notice` that names the letters it settles. Replayed records and their mark are written in one transaction, so
a letter is marked if and only if its event stands in its source topic again. `dead-letters` itself is not touched: what
was refused stays refused there, and its retention does not end a mark before its letter (`notices` are kept).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from rollwire.schemas.errors import ConfigError
from rollwire.schemas.records import DeadLetter, Event, Notice
from rollwire.streams.seams.log import Outgoing

Action = Literal["replayed", "dropped"]
ACTIONS: Final[tuple[Action, ...]] = ("replayed", "dropped")

REPLAY_OF: Final = "rollwire-replay-of"
"""Header of a replayed record: `<partition>:<offset>` of the dead letter it was made from."""
REPLAY_COUNT: Final = "rollwire-replay-count"
"""Header of a replayed record: how often its event has been replayed, this time included."""

_NAME: Final = "dead-letters."
_MODEL: Final = "all"  # a notice names a model; letters are of the whole prefix


class LetterAt(NamedTuple):
    """Where a dead letter stands in `dead-letters`."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}:{self.offset}"


class Settlement(NamedTuple):
    """One mark: what was done to which letters, by whom and why."""

    action: Action
    letters: tuple[LetterAt, ...]
    why: str
    by: str
    at_us: int


def parse_letter(text: str) -> LetterAt:
    """`<partition>:<offset>`. Raises `ConfigError`."""
    partition, colon, offset = text.partition(":")
    if not (colon and partition.isdecimal() and offset.isdecimal()):
        raise ConfigError(f"{text!r} is not of the form partition:offset, as in 0:17")
    return LetterAt(int(partition), int(offset))


def mark(done: Settlement) -> Notice:
    """The event that settles letters."""
    said = f": {done.why}" if done.why else ""
    return Notice(
        model=_MODEL,
        name=_NAME + done.action,
        severity="info",
        text=f"{len(done.letters)} dead letters {done.action} by {done.by}{said}",
        attributes={"letters": ",".join(map(str, done.letters)), "why": done.why, "by": done.by},
        at_us=done.at_us,
    )


def settlement_of(event: Event) -> Settlement | None:
    """The mark that an event is; None for every other event."""
    if not isinstance(event, Notice) or not event.name.startswith(_NAME):
        return None
    for action in ACTIONS:
        if event.name == _NAME + action:
            try:
                letters = tuple(map(parse_letter, event.attributes["letters"].split(",")))
            except (ConfigError, KeyError):
                return None  # not written by `mark`
            attributes = event.attributes
            return Settlement(
                action, letters, attributes.get("why", ""), attributes.get("by", ""), event.at_us
            )
    return None


def replay_count(headers: Sequence[tuple[str, bytes | None]]) -> int:
    """How often the event of a record was replayed before, as its header says; 0 for one that never was."""
    found = next((value for name, value in headers if name == REPLAY_COUNT), None)
    return int(found) if found is not None and found.isdigit() and len(found) <= 9 else 0


def replay(letter: DeadLetter, at: LetterAt, count: int) -> Outgoing:
    """The refused record again: key, value and headers as they were, on its own partition, and which letter it replays.

    The partition is the old one, not the key's: a record whose key is missing or odd is read by whom it was read before.
    """
    kept = tuple((h.key, h.value) for h in letter.headers if h.key not in (REPLAY_OF, REPLAY_COUNT))
    told = ((REPLAY_OF, str(at).encode()), (REPLAY_COUNT, str(count).encode()))
    return Outgoing(letter.source.topic, letter.key, letter.value, (*kept, *told), letter.source.partition)
