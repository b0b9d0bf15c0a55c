"""The keys by which history is sealed and verified, as commands and roles open them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollwire.ops.stack.secret_file import read_secret
from rollwire.ops.stack.signing_key import (
    VARIABLE,
    ensure_signing_key,
    public_key_file,
    signing_key_file,
)
from rollwire.schemas.errors import ConfigError
from rollwire.streams.archive.heads import LocalSigner, read_public_key, trusted_keys
from rollwire.streams.archive.sealed import Trusted


def open_signer(folder: Path) -> LocalSigner:
    """Of the stack whose state is in `folder`: the key that `ROLLWIRE_SIGNING_KEY_FILE` names, else the stack's own. Raises
    `ConfigError`."""
    path = signing_key_file(folder)
    if folder.exists() and not path.exists():  # a stack that was started before it had one gets it now
        try:
            ensure_signing_key(folder)
        except OSError as error:
            raise ConfigError(f"the signing key {path} cannot be made: {error.strerror}") from None
    return read_secret(path, "signing key", VARIABLE, LocalSigner)


def open_sealing(folder: Path, files: Sequence[Path]) -> tuple[LocalSigner, Trusted]:
    """The signer, and whose heads it goes on from: its own, and those by the keys of `files`. Raises `ConfigError`."""
    signer = open_signer(folder)
    return signer, {**(open_trusted(folder, files) if files else {}), **trusted_keys(signer.public)}


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
