"""FULL compatibility: readers of either schema version read what the other wrote.

Judged by Apache Avro's own checker (the `avro` package of the `dev` extra), not by us. Every version is checked against
every other released one, not only against its neighbour.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType
from avro.schema import Schema, parse

from rollwire.schemas.catalogue import TopicSpec, avro_folder


def read_break(reader: Any, writer: Any) -> str | None:
    """Why a reader's schema (JSON) cannot read what a writer's schema wrote; None = it can."""
    checker = ReaderWriterCompatibilityChecker()  # type: ignore[no-untyped-call]
    result = checker.get_compatibility(_parsed(reader), _parsed(writer))
    if result.compatibility is SchemaCompatibilityType.compatible:
        return None
    kinds = sorted(kind.name for kind in result.incompatibilities)
    places = sorted(map(str, result.locations))
    return f"{', '.join(kinds)} at {', '.join(places)} ({', '.join(sorted(map(str, result.messages)))})"


def full_breaks(spec: TopicSpec, files: Mapping[int, Any]) -> list[str]:
    """Every break between two versions of a topic's schemas (version -> JSON), naming who would break."""
    found: list[str] = []
    for reader in files:
        for writer in files:
            problem = None if reader == writer else read_break(files[reader], files[writer])
            if problem is not None:
                # An old reader that cannot follow is a consumer; a new one cannot read what producers wrote before.
                who = spec.consumers if reader < writer else (*spec.producers, *spec.consumers)
                found.append(
                    f"{spec.name}: a reader of v{reader} cannot read v{writer}: {problem}; breaks {', '.join(who)}"
                )
    return found


def schema_files(spec: TopicSpec) -> dict[int, Any]:
    """version -> schema as its file says."""
    return {s.version: json.loads((avro_folder() / s.file).read_text("utf-8")) for s in spec.schemas}


def _parsed(schema: Any) -> Schema:
    return parse(json.dumps(schema))
