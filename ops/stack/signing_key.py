"""The key that signs sealed heads: `rollwire up` makes it once, `signing.key` (private) and `signing.pub` beside it.

Whoever has the private key can seal another history; so where that matters it is kept away from those who can write to the
store, and named by `ROLLWIRE_SIGNING_KEY_FILE` where the sealer runs. Auditors need the public key alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from rollwire.ops.stack.secret_file import made_once
from rollwire.streams.archive.heads import LocalSigner, new_signing_key

VARIABLE: Final = "ROLLWIRE_SIGNING_KEY_FILE"


def signing_key_file(folder: Path) -> Path:
    return Path(named) if (named := os.environ.get(VARIABLE)) else folder / "signing.key"


def public_key_file(folder: Path) -> Path:
    return folder / "signing.pub"


def ensure_signing_key(folder: Path) -> Path:
    """The private key's file, made with its public half where it is ours to make: never replaced."""
    path = signing_key_file(folder)
    if VARIABLE in os.environ:
        return path
    made_once(path, new_signing_key)
    made_once(public_key_file(folder), lambda: LocalSigner(path.read_bytes()).public_pem(), 0o644)
    return path
