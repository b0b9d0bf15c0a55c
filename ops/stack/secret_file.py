"""A file that is made once and never replaced, whole or not at all: keys."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path


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
