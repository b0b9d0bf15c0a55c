"""The signing key's files: made once, private, and named where they are elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollwire.ops.signing import open_signer, open_trusted
from rollwire.ops.stack.signing_key import (
    VARIABLE,
    ensure_signing_key,
    public_key_file,
    signing_key_file,
)
from rollwire.schemas.errors import ConfigError
from rollwire.streams.archive.heads import LocalSigner, key_id_of, new_signing_key


def test_it_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    path = ensure_signing_key(tmp_path)
    made = path.read_bytes()
    assert path == signing_key_file(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert ensure_signing_key(tmp_path).read_bytes() == made
    signer = open_signer(tmp_path)
    assert list(open_trusted(tmp_path, ())) == [signer.key_id] == [key_id_of(signer.public)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["signing.key", "signing.pub"]


def test_a_key_that_is_named_is_taken_and_none_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere.pem"
    monkeypatch.setenv(VARIABLE, str(elsewhere))
    with pytest.raises(ConfigError, match=r"elsewhere\.pem cannot be read"):
        open_signer(tmp_path)
    elsewhere.write_bytes(new_signing_key())
    elsewhere.chmod(0o600)
    assert ensure_signing_key(tmp_path) == elsewhere
    assert open_signer(tmp_path).key_id == LocalSigner(elsewhere.read_bytes()).key_id
    assert not public_key_file(tmp_path).exists()


def test_what_is_no_key_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "signing.key").write_bytes(b"no key")
    (tmp_path / "signing.key").chmod(0o600)
    with pytest.raises(ConfigError, match=r"signing\.key: this is no private key"):
        open_signer(tmp_path)
    with pytest.raises(ConfigError, match="this is no public key"):
        open_trusted(tmp_path, [tmp_path / "signing.key"])
    with pytest.raises(ConfigError, match="--public-key"):
        open_trusted(tmp_path, [tmp_path / "none.pub"])
