"""A version as a folder that transformers and any engine open as it is: safetensors shards, index, config.json."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollwire.consumers.weights.anchor import CONFIG_FILE, write_anchor
from rollwire.consumers.weights.paths import anchor_claim, known_versions, plan_path
from rollwire.consumers.weights.reader import anchor_manifest, load_path, read_object
from rollwire.schemas.errors import ConfigError, ObjectMissing, WeightError
from rollwire.schemas.records import WeightLink, WeightVersion
from rollwire.streams.seams.store import ObjectStore


def export_version(
    store: ObjectStore,
    events: Sequence[WeightVersion],
    links: Sequence[WeightLink],
    version: int,
    folder: Path,
    *,
    shard_bytes: int = 5 << 30,
) -> list[str]:
    """Writes a verified version into a new folder, whole or not at all; the names of its files.

    `config.json` is that of the lineage's nearest snapshot at or below the version, where there is one. Raises
    `ConfigError` where the folder holds something, and what `plan_path` and `load_path` raise.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty: name a folder that is not there yet")
    loaded = load_path(store, plan_path(events, links, None, version), None)
    files = write_anchor(loaded.state, shard_bytes=shard_bytes, hf_config=hf_config(store, events, version))
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        partial.mkdir()
        for file, data in files:
            with (partial / file).open("wb") as out:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return [file for file, _ in files]


def hf_config(store: ObjectStore, events: Sequence[WeightVersion], version: int) -> dict[str, Any] | None:
    """The `config.json` of the nearest snapshot at or below a version that has one; None = no snapshot has."""
    known = known_versions(events)
    for at in sorted((v for v in known if v <= version), reverse=True):
        if anchor_claim(known[at]) is None:
            continue
        try:
            manifest = anchor_manifest(store, known[at])
        except (WeightError, ObjectMissing):  # the collector took it
            continue
        for entry in manifest.objects:
            if entry.file == CONFIG_FILE:
                return msgspec.json.decode(
                    read_object(store, entry.key, entry.size, entry.sha256), type=dict[str, Any]
                )
    return None
