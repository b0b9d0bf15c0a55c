"""The file of the master key, under which people's data keys are wrapped: `rollwire up` makes it once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from rollwire.ops.stack.secret_file import made_once
from rollwire.streams.seams.master_key import new_master_key

VARIABLE: Final = "ROLLWIRE_MASTER_KEY_FILE"


def master_key_file(folder: Path) -> Path:
    return Path(named) if (named := os.environ.get(VARIABLE)) else folder / "master.key"


def ensure_master_key(folder: Path) -> Path:
    """The file, made where it is ours to make: never replaced, whole or not at all, readable by its owner only."""
    path = master_key_file(folder)
    return path if VARIABLE in os.environ else made_once(path, new_master_key)
