"""What an auditor remembers of the heads that he saw: nothing in a store can say that its newest heads were taken away."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from rollwire.schemas.errors import AuditError, ConfigError
from rollwire.streams.archive.heads import head_digest, read_unverified

FILE: Final = "audit-seen.json"


class Seen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    epoch: int
    sha256: str  # of the head's object


def seen_file(folder: Path) -> Path:
    return folder / FILE


def read_seen(file: Path) -> dict[str, Seen]:
    """The newest head that was seen, by run; empty where there is no file. Raises `ConfigError`."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Seen])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file}: what was seen before cannot be read: {error}") from error


def remember(file: Path, name: str, seen: Seen) -> None:
    """Replaces what was remembered of the run."""
    known = {**read_seen(file), name: seen}
    partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    partial.write_bytes(
        msgspec.json.format(msgspec.json.encode(known, order="deterministic"), indent=2) + b"\n"
    )
    os.replace(partial, file)


def pinned_heads(files: Sequence[Path]) -> dict[int, str]:
    """Heads that were copied to somewhere else, by epoch. Raises `ConfigError`."""
    found: dict[int, str] = {}
    for file in files:
        try:
            data = file.read_bytes()
            found[read_unverified(data).epoch] = head_digest(data)
        except (OSError, AuditError) as error:
            raise ConfigError(f"{file}: it is no head: {error}") from error
    return found
