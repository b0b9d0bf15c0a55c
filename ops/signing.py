"""The keys by which history is sealed and verified, as commands and roles open them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog

from rollwire.ops.stack.signing_key import (
    VARIABLE,
    ensure_signing_key,
    public_key_file,
    signing_key_file,
)
from rollwire.schemas.errors import ConfigError
from rollwire.streams.archive.heads import LocalSigner, read_public_key, trusted_keys
from rollwire.streams.archive.sealed import Trusted

_OTHERS: Final = 0o077
_logger = structlog.get_logger("rollwire.signing")


def open_signer(folder: Path) -> LocalSigner:
    """Of the stack whose state is in `folder`: the key that `ROLLWIRE_SIGNING_KEY_FILE` names, else the stack's own. Raises
    `ConfigError`."""
    path = signing_key_file(folder)
    try:
        if folder.exists() and not path.exists():  # a stack that was started before it had one gets it now
            ensure_signing_key(folder)
        pem, mode = path.read_bytes(), path.stat().st_mode
    except OSError as error:
        raise ConfigError(
            f"the signing key {path} cannot be read ({error.strerror}): `rollwire up` makes one, or name yours by {VARIABLE}"
        ) from None
    if mode & _OTHERS:
        _logger.warning("signing_key.readable_by_others", path=str(path), advice=f"chmod 600 {path}")
    try:
        return LocalSigner(pem)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def open_trusted(folder: Path, files: Sequence[Path]) -> Trusted:
    """The public keys of `files`; without any, the stack's own. Raises `ConfigError`."""
    keys = []
    for path in files or (public_key_file(folder),):
        try:
            keys.append(read_public_key(path.read_bytes()))
        except OSError as error:
            raise ConfigError(
                f"the public key {path} cannot be read ({error.strerror}): name it by --public-key"
            ) from None
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
    return trusted_keys(*keys)
