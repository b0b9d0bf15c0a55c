"""The master key's file: made once, for its owner alone, and named where it is not the stack's."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest

from rollwire.consumers.trainer.connect import LiveKeys
from rollwire.ops.keys import open_keys, open_master_key, pseudonym_secret
from rollwire.ops.stack import StackConfig, StackInfo
from rollwire.ops.stack.master_key import ensure_master_key, master_key_file
from rollwire.schemas.errors import ConfigError, Erased


def stack_in(folder: Path) -> StackInfo:
    return StackInfo(
        dir=folder,
        bootstrap="127.0.0.1:1",
        s3_endpoint="http://127.0.0.1:1",
        access_key="a",
        secret_key="s",
        bucket="rollwire",
        redis_url="redis://127.0.0.1:1",
        ready=True,
        services={},
        config=StackConfig(dir=folder),
    )


@pytest.fixture(autouse=True)
def _nothing_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLWIRE_MASTER_KEY_FILE", raising=False)


def test_it_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: ensure_master_key(tmp_path), range(8)))
    assert paths == {tmp_path / "master.key"}
    path = tmp_path / "master.key"
    made = path.read_bytes()
    assert len(made) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    ensure_master_key(tmp_path)
    assert path.read_bytes() == made
    assert [one.name for one in tmp_path.iterdir()] == ["master.key"]


def test_one_that_is_named_is_used_and_never_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = tmp_path / "elsewhere"
    monkeypatch.setenv("ROLLWIRE_MASTER_KEY_FILE", str(named))
    assert ensure_master_key(tmp_path) == named == master_key_file(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="ROLLWIRE_MASTER_KEY_FILE"):
        open_master_key(stack_in(tmp_path))
    named.write_bytes(bytes(31))
    with pytest.raises(ConfigError, match="has 31"):
        open_keys(stack_in(tmp_path))
    named.write_bytes(bytes(32))
    named.chmod(0o600)
    assert pseudonym_secret(stack_in(tmp_path)) == open_master_key(stack_in(tmp_path)).pseudonym_secret()


@pytest.mark.system
def test_a_stack_has_a_master_key_and_keys_that_outlive_their_processes(stack: StackInfo) -> None:
    assert stat.S_IMODE((stack.dir / "master.key").stat().st_mode) == 0o600
    person = "d" * 32
    made = open_keys(stack).data_key(person)
    assert open_keys(stack).key_of(person, made.generation) == made.key
    # What a rank's own process is given: the name of the file, not the key in it.
    for_ranks = LiveKeys(
        master_key_file(stack.dir), stack.s3_endpoint, stack.bucket, stack.access_key, stack.secret_key
    )
    assert for_ranks().key_of(person, made.generation) == made.key
    assert (stack.dir / "master.key").read_bytes() not in bytes(ForkingPickler.dumps(for_ranks))
    keys = open_keys(stack)
    assert keys.destroy(person) == made.generation
    with pytest.raises(Erased):
        open_keys(stack).key_of(person, made.generation)
