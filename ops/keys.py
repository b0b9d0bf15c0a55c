"""The master key of a stack, and its key store.

The master key is the file that `ROLLWIRE_MASTER_KEY_FILE` names, else `master.key` in the stack's folder, which `rollwire
up` makes. Losing it is losing everything that is sealed; who has it and the bucket can open everything.
"""

from __future__ import annotations

from rollwire.ops.stack.info import StackInfo
from rollwire.ops.stack.master_key import VARIABLE, master_key_file
from rollwire.ops.stack.secret_file import read_secret
from rollwire.ops.stores import stack_store
from rollwire.streams.seams.keys_cached import CachedKeys
from rollwire.streams.seams.keys_store import StoredKeys
from rollwire.streams.seams.master_key import LocalMasterKey


def open_master_key(stack: StackInfo) -> LocalMasterKey:
    """Raises `ConfigError` where the file is not there, cannot be read or has not 32 bytes."""
    return read_secret(master_key_file(stack.dir), "master key", VARIABLE, LocalMasterKey)


def open_keys(stack: StackInfo, *, ttl_s: float = 60.0, timeout_s: float | None = None) -> CachedKeys:
    """The stack's key store, with a cache in front that `streams.seams.erasures.ErasureFollower` has forget. Nothing is
    asked yet. `timeout_s` bounds each call of the store, for who must answer soon.

    It is in the stack's own bucket, also for a run that keeps its weights elsewhere: a person's keys in two places would be
    two different keys of one number, and an erasure could miss one.
    """
    return CachedKeys(
        StoredKeys(stack_store(stack, None, timeout_s=timeout_s), open_master_key(stack)), ttl_s=ttl_s
    )


def pseudonym_secret(stack: StackInfo) -> bytes:
    """What `rollwire.schemas.pseudonyms.pseudonym_of` needs."""
    return open_master_key(stack).pseudonym_secret()
