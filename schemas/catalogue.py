"""The topic catalogue: `schemas/topics/*.toml` as frozen specs.

Provisioning, the codec and the documentation follow from it. A key that a topic file may not have is an error that
names the nearest right one; so is a missing one, a schema file that is not there or a record that does not exist.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from types import MappingProxyType
from typing import Any, Final

import msgspec

from rollwire.schemas import records
from rollwire.schemas.errors import ConfigError
from rollwire.schemas.identity import KEYS

CLAIM_CHECK_BYTES: Final = 512 * 1024
"""A payload above this goes to the object store; the event carries a `Claim`."""

BROKER_MESSAGE_MAX_BYTES: Final = 8 * 1024 * 1024
"""`message.max.bytes` of the broker. Dead letters allow more, so that every refused event fits whole."""

RECORD_OVERHEAD_BYTES: Final = 64 * 1024
"""Kept free of a topic's limit for key, headers and framing."""

_POLICIES: Final = ("delete", "compact", "compact,delete")
_NAME: Final = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


class _Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what is read from a topic file."""


class SchemaVersion(_Spec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int  # 1, 2, 3, ...; the last one is written, all are read
    file: str  # in schemas/avro/
    compatibility: str  # "FULL": readers of either version read the other
    examples: str  # folder under schemas/examples/


class Placement(_Spec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How safely a topic is kept."""

    replication_factor: int
    min_insync_replicas: int
    unclean_leader_election: bool


class TopicSpec(_Spec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str  # without the prefix
    description: str
    owner: str
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    key: str  # a member of rollwire.schemas.identity.KEYS
    partitions: int
    retention_ms: int  # -1 = unlimited
    archive_ms: int = -1  # how long the archive keeps it: -1 = for ever, 0 = it is not archived
    cleanup_policy: str  # "delete" | "compact" | "compact,delete"
    max_message_bytes: int
    record: str  # class in rollwire.schemas.records
    schemas: tuple[SchemaVersion, ...]  # ascending
    production: Placement
    local: Placement

    @property
    def record_class(self) -> type[records.Event]:
        return getattr(records, self.record)  # type: ignore[no-any-return]

    @property
    def compacted(self) -> bool:
        """Whether a null value is a delete here."""
        return "compact" in self.cleanup_policy

    @property
    def max_value_bytes(self) -> int:
        return self.max_message_bytes - RECORD_OVERHEAD_BYTES

    @property
    def current(self) -> SchemaVersion:
        return self.schemas[-1]


def _names(where: str, table: Mapping[str, Any], spec: type[_Spec]) -> None:
    known = spec.__struct_fields__
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}")


def parse_topic(text: str, where: str) -> TopicSpec:
    """A topic file's content as a spec. `where` names the file in errors. Raises `ConfigError`."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not TOML: {error}") from error
    _names(where, table, TopicSpec)
    for entry in table.get("schemas", ()):
        _names(f"{where} [[schemas]]", entry, SchemaVersion)
    for section in ("production", "local"):
        _names(f"{where} [{section}]", table.get(section, {}), Placement)
    try:
        spec = msgspec.convert(table, TopicSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error
    _check(spec, where)
    return spec


def _check(spec: TopicSpec, where: str) -> None:
    if not _NAME.fullmatch(spec.name):
        raise ConfigError(
            f"{where}: name {spec.name!r} must be lower-case words joined by '-' (dots and '_' collide in metrics)"
        )
    if spec.key not in KEYS:
        raise ConfigError(f"{where}: key {spec.key!r} is not one of {', '.join(KEYS)}")
    if spec.cleanup_policy not in _POLICIES:
        raise ConfigError(
            f"{where}: cleanup_policy {spec.cleanup_policy!r} is not one of {', '.join(_POLICIES)}"
        )
    if spec.partitions < 1:
        raise ConfigError(f"{where}: partitions must be at least 1, is {spec.partitions}")
    if spec.retention_ms != -1 and spec.retention_ms < 1:
        raise ConfigError(f"{where}: retention_ms must be positive, or -1 for unlimited")
    if spec.archive_ms < -1:
        raise ConfigError(
            f"{where}: archive_ms must be positive, -1 to archive for ever, or 0 not to archive"
        )
    if spec.max_message_bytes <= 2 * RECORD_OVERHEAD_BYTES:
        raise ConfigError(f"{where}: max_message_bytes {spec.max_message_bytes} leaves no room for a value")
    if [s.version for s in spec.schemas] != list(range(1, len(spec.schemas) + 1)) or not spec.schemas:
        raise ConfigError(f"{where}: schema versions must be 1, 2, 3, ... in order")
    for schema in spec.schemas:
        if schema.compatibility != "FULL":
            raise ConfigError(f"{where}: schema version {schema.version} must be kept FULL compatible")
        if not (avro_folder() / schema.file).is_file():
            raise ConfigError(f"{where}: schemas/avro/{schema.file} is not there")
    record = getattr(records, spec.record, None)
    if not (isinstance(record, type) and issubclass(record, records.Event)):
        raise ConfigError(f"{where}: record {spec.record!r} is no event of rollwire.schemas.records")
    for section in (spec.production, spec.local):
        if not 1 <= section.min_insync_replicas <= section.replication_factor:
            raise ConfigError(f"{where}: min_insync_replicas must be between 1 and replication_factor")


def avro_folder() -> Traversable:
    return resources.files("rollwire.schemas") / "avro"


def load_topics() -> Mapping[str, TopicSpec]:
    """All topic files by topic name, sorted. Raises `ConfigError`."""
    folder = resources.files("rollwire.schemas") / "topics"
    topics: dict[str, TopicSpec] = {}
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if not file.name.endswith(".toml"):
            continue
        where = f"schemas/topics/{file.name}"
        spec = parse_topic(file.read_text(encoding="utf-8"), where)
        if file.name != f"{spec.name}.toml":
            raise ConfigError(f"{where}: name {spec.name!r} is not the file's")
        topics[spec.name] = spec
    return MappingProxyType(topics)


TOPICS: Final[Mapping[str, TopicSpec]] = load_topics()


def topic_named(name: str) -> TopicSpec:
    """The spec of a topic (without the prefix). Raises `ConfigError` naming the nearest right one."""
    if name in TOPICS:
        return TOPICS[name]
    near = difflib.get_close_matches(name, TOPICS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(TOPICS)}"
    raise ConfigError(f"{name!r} is no topic; {hint}")
