"""The golden examples: one JSON file an event in `schemas/examples/<topic>/v<version>/`.

Each holds the event (bytes as base64), its key, its headers and the encoded value in hex, so that a change of a single
byte of what is written shows. They are the examples of the documentation and the valid events of the tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.records import Event

EXAMPLES: Final = Path(__file__).parent / "examples"


E = TypeVar("E", bound=Event)


class Example(NamedTuple):
    topic: str
    version: int  # of the schema it was written under
    name: str  # of the file, without its suffix
    event: Event
    plain: dict[str, Any]  # the event as the file has it
    key: bytes
    headers: tuple[tuple[str, bytes | None], ...]
    value: bytes


def load_examples(topic: str) -> list[Example]:
    """The examples of all schema versions of a topic, by version and name. Raises `KeyError` for an unknown topic."""
    spec = TOPICS[topic]
    found: list[Example] = []
    for schema in spec.schemas:
        for path in sorted((EXAMPLES / schema.examples).glob("*.json")):
            content = json.loads(path.read_text("utf-8"))
            found.append(
                Example(
                    topic,
                    schema.version,
                    path.stem,
                    msgspec.convert(content["event"], spec.record_class),
                    content["event"],
                    content["key"].encode(),
                    tuple((name, text.encode()) for name, text in content["headers"].items()),
                    bytes.fromhex("".join(content["value_hex"])),
                )
            )
    return found


def example(kind: type[E], name: str = "") -> E:
    """The newest example of a kind of event, or the newest of that name. Raises `KeyError` where there is none."""
    for topic, spec in TOPICS.items():
        if spec.record_class is kind:
            for one in reversed(load_examples(topic)):
                if name in ("", one.name) and isinstance(one.event, kind):
                    return one.event
    raise KeyError(f"{kind.__name__} {name}".strip())


def all_examples() -> list[Example]:
    return [example for topic in TOPICS for example in load_examples(topic)]
