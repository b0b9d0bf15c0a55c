"""The schemas for others, as files: AsyncAPI, Avro or JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollwire.ops.asyncapi.document import document_text
from rollwire.schemas.catalogue import TOPICS, avro_folder

Format = Literal["asyncapi", "avro", "json"]


def exported(kind: Format, *, prefix: str, bootstrap: str, registry_url: str | None) -> Mapping[str, str]:
    """File name -> content.

    `asyncapi`: one document of everything. `avro`: each released schema as it is. `json`: a JSON Schema of each topic's
    current event as the golden examples write it (bytes as base64).
    """
    if kind == "asyncapi":
        text = document_text(prefix=prefix, bootstrap=bootstrap, registry_url=registry_url)
        return {"asyncapi.json": text}
    if kind == "avro":
        return {
            released.file: (avro_folder() / released.file).read_text("utf-8")
            for spec in TOPICS.values()
            for released in spec.schemas
        }
    return {
        f"{spec.name}.v{spec.current.version}.schema.json": json.dumps(
            _json_schema(spec.record_class), indent=2
        )
        + "\n"
        for spec in TOPICS.values()
    }


def _json_schema(record: type[Any]) -> dict[str, Any]:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(record)}
    # A struct ignores what it does not know; an event may not hold it (C62).
    for definition in schema.get("$defs", {}).values():
        if definition.get("type") == "object" and "properties" in definition:
            definition.setdefault("additionalProperties", False)
    return schema


def write_export(folder: Path, files: Mapping[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, "utf-8")
