"""What a change of the topic files and schemas breaks, and for whom: two states of them compared.

A schema that was released is never edited: the log holds events under its fingerprint. What it should say goes into a next
version, under FULL compatibility with all before it (`compat.py`).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rollwire.schemas.codec import fingerprint_of
from rollwire.schemas.compat import read_break
from rollwire.schemas.errors import ConfigError


class TopicSchemas(NamedTuple):
    """What of a topic others depend on."""

    name: str
    key: str
    partitions: int
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    schemas: Mapping[int, Any]  # version -> schema as JSON says it

    @property
    def everybody(self) -> tuple[str, ...]:
        return (*self.producers, *(c for c in self.consumers if c not in self.producers))


class Change(NamedTuple):
    topic: str
    text: str
    breaks: tuple[str, ...]  # components of the topic file that break; empty: nobody does


def read_tree(files: Mapping[str, str]) -> dict[str, TopicSchemas]:
    """The topics of a tree, by name. `files`: path below `schemas/` (`topics/x.toml`, `avro/x.v1.avsc`) -> content.

    Reads only what it compares, so that trees of other times are read too. Raises `ConfigError` naming a wrong file.
    """
    topics: dict[str, TopicSchemas] = {}
    for path, text in sorted(files.items()):
        if not (path.startswith("topics/") and path.endswith(".toml")):
            continue
        try:
            table = tomllib.loads(text)
            topics[table["name"]] = TopicSchemas(
                name=table["name"],
                key=table["key"],
                partitions=table["partitions"],
                producers=tuple(table["producers"]),
                consumers=tuple(table["consumers"]),
                schemas={s["version"]: json.loads(files[f"avro/{s['file']}"]) for s in table["schemas"]},
            )
        except (KeyError, TypeError, ValueError) as error:  # TOML's and JSON's errors are ValueErrors
            raise ConfigError(f"schemas/{path}: {type(error).__name__}: {error}") from error
    return topics


def compare(released: Mapping[str, TopicSchemas], now: Mapping[str, TopicSchemas]) -> list[Change]:
    """Every change from the released state to this one, by topic."""
    changes: list[Change] = []
    for name in sorted({*released, *now}):
        if name not in now:
            changes.append(Change(name, "the topic is gone", released[name].everybody))
        elif name not in released:
            changes.append(Change(name, "a new topic", ()))
        else:
            changes += _topic(released[name], now[name])
    return changes


def _topic(old: TopicSchemas, new: TopicSchemas) -> Iterator[Change]:
    if old.key != new.key:
        text = f"the key was {old.key} and is {new.key}: the same events go to other partitions"
        yield Change(old.name, text, old.everybody)
    if old.partitions != new.partitions:
        text = f"there were {old.partitions} partitions and are {new.partitions}: keys move, joins miss"
        yield Change(old.name, text, old.everybody)
    for version, schema in old.schemas.items():
        yield from _released_version(old, new, version, schema)
    for version in new.schemas:
        if version not in old.schemas:
            yield from _new_version(new, version, old)


def _released_version(old: TopicSchemas, new: TopicSchemas, version: int, schema: Any) -> Iterator[Change]:
    if version not in new.schemas:
        text = f"v{version} is gone: its events in the log can be read no more"
        yield Change(old.name, text, old.everybody)
        return
    edited = new.schemas[version]
    if fingerprint_of(edited) == fingerprint_of(schema):
        return
    problems = [
        f"{who}: {problem}"
        for who, problem in (
            ("new readers of old events", read_break(edited, schema)),
            ("old readers of new events", read_break(schema, edited)),
        )
        if problem is not None
    ]
    text = (
        f"v{version} was edited after its release ({_fields(schema, edited)}): events in the log carry the fingerprint "
        f"{fingerprint_of(schema).hex()} and can be read no more; make it v{max(new.schemas) + 1}"
    )
    yield Change(old.name, "; ".join([text, *problems]), old.everybody)


def _new_version(new: TopicSchemas, version: int, old: TopicSchemas) -> Iterator[Change]:
    schema = new.schemas[version]
    fine = True
    for before in sorted(set(new.schemas) - {version}):
        if before > version and before not in old.schemas:
            continue  # the pair is judged when the later one's turn comes
        other = new.schemas[before]
        if (problem := read_break(schema, other)) is not None:
            fine = False
            text = f"v{version} cannot read what v{before} wrote: {problem}"
            yield Change(new.name, text, new.consumers)
        if (problem := read_break(other, schema)) is not None:
            fine = False
            text = f"a reader of v{before} cannot read what v{version} writes: {problem}"
            yield Change(new.name, text, old.consumers)
    if fine:
        previous = new.schemas[max((v for v in new.schemas if v < version), default=version)]
        yield Change(new.name, f"v{version} is new ({_fields(previous, schema)})", ())


def _fields(old: Any, new: Any) -> str:
    """The difference of two records' fields in a few words."""
    before = {field["name"]: field["type"] for field in old.get("fields", ())}
    after = {field["name"]: field["type"] for field in new.get("fields", ())}
    words = [f"+{name}" for name in after if name not in before]
    words += [f"-{name}" for name in before if name not in after]
    words += [f"~{name}" for name in after if name in before and after[name] != before[name]]
    return ", ".join(words) or "the same fields"
