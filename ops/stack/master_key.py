"""The file of the master key, under which people's data keys are wrapped: `rollwire up` makes it once."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

from rollwire.streams.seams.master_key import new_master_key

VARIABLE: Final = "ROLLWIRE_MASTER_KEY_FILE"


def master_key_file(folder: Path) -> Path:
    return Path(named) if (named := os.environ.get(VARIABLE)) else folder / "master.key"


def ensure_master_key(folder: Path) -> Path:
    """The file, made where it is ours to make: never replaced, whole or not at all, readable by its owner only."""
    path = master_key_file(folder)
    if VARIABLE in os.environ or path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{path.name}.{secrets.token_hex(8)}"
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(new_master_key())
            out.flush()
            os.fsync(out.fileno())
        # Of two that make one at once the first counts: a link does not replace, as a rename would.
        os.link(partial, path)
    except FileExistsError:
        return path
    finally:
        partial.unlink(missing_ok=True)
    return path
