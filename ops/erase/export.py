"""All that the log still holds of one person, in the clear: what they are given when they ask for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from rollwire.ops.erase.reach import Reach
from rollwire.ops.readable import Look, readable_record
from rollwire.schemas.errors import Refused
from rollwire.schemas.ids import parse_rollout_id
from rollwire.schemas.records import Feedback, ProductionRollout, Reward
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.places import exists
from rollwire.streams.seams.scan import scan

TOPICS: Final = ("user-feedback", "production-rollouts", "rewards")


class Exported(NamedTuple):
    topic: str
    shown: dict[str, Any]  # as `rollwire cat --open` shows it
    erased: bool  # it was sealed for them and opens no more


def export(
    log: Log, reach: Reach, look: Look, text: Callable[[ProductionRollout, bytes], str | None]
) -> Iterator[Exported]:
    """Their feedback, their live traffic, and the rewards of that. `text` reads a rollout's tokens for people, where it can."""
    own = set(reach.rollouts)
    groups = {parse_rollout_id(one)[0].encode() for one in own}
    subject = reach.subject.encode()
    for topic in TOPICS:
        for record in scan(log, (topic,)) if exists(log, topic) else ():
            if record.key not in groups if topic == "rewards" else subject not in (record.value or b""):
                continue
            try:
                event = decode_record(record)
            except Refused:
                continue
            match event:
                case Feedback() if event.subject == reach.subject:
                    shown = readable_record(record, look)
                    yield Exported(topic, shown, shown["event"]["comment"] == "erased")
                case ProductionRollout(sealed=seal) if seal is not None and event.rollout_id in own:
                    shown = readable_record(record, look)
                    erased = shown["event"]["token_ids"] == "erased"
                    opened = look(seal, event.rollout_id, "token_ids", event.token_ids)
                    if isinstance(opened, bytes) and (words := text(event, opened)) is not None:
                        shown["text"] = words
                    yield Exported(topic, shown, erased)
                case Reward() if event.rollout_id in own:
                    yield Exported(topic, readable_record(record, look), False)
                case _:
                    pass
