"""Keys in files: made once and never replaced, whole or not at all, and read with a word where others can read them too."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import structlog

from rollwire.schemas.errors import ConfigError

_OTHERS: Final = 0o077
_T = TypeVar("_T")
_logger = structlog.get_logger("rollwire.keys")


def made_once(path: Path, content: Callable[[], bytes], mode: int = 0o600) -> Path:
    """The file, made with `content` where it is not there; by default only its owner may read it."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
            out.write(content())
            out.flush()
            os.fsync(out.fileno())
        # Of two that make one at once the first counts: a link does not replace, as a rename would.
        os.link(partial, path)
    except FileExistsError:
        return path
    finally:
        partial.unlink(missing_ok=True)
    return path


def read_secret(path: Path, what: str, variable: str, parse: Callable[[bytes], _T]) -> _T:
    """What `parse` makes of the file. `what` it is, and the `variable` that can name another, are for messages. Raises
    `ConfigError` where the file is not there, cannot be read or is not what `parse` takes."""
    try:
        secret, mode = path.read_bytes(), path.stat().st_mode
    except OSError as error:
        raise ConfigError(
            f"the {what} {path} cannot be read ({error.strerror}): `rollwire up` makes one, or name yours by {variable}"
        ) from None
    if mode & _OTHERS:
        _logger.warning(
            f"{what.replace(' ', '_')}.readable_by_others", path=str(path), advice=f"chmod 600 {path}"
        )
    try:
        return parse(secret)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
