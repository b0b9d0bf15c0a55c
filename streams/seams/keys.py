"""The key seam: a data key for every person, under a master key, and the destruction of it.

A person is a pseudonym (`rollwire.schemas.pseudonyms`). Their data keys are numbered by generation: a person who comes
again after an erasure gets the next one. Destruction is for ever: a destroyed generation never has a key again.
`keys_memory.MemoryKeys` and `keys_store.StoredKeys` pass one behavioural suite (`tests/streams/seams/test_keys.py`).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class DataKey(NamedTuple):
    generation: int  # from 1
    key: bytes  # 32 bytes

    def __repr__(self) -> str:
        """Without the key: a traceback or a log line may show it."""
        return f"DataKey(generation={self.generation})"


class KeyState(NamedTuple):
    """The generations of one person, ascending."""

    live: tuple[int, ...]
    destroyed: tuple[int, ...]


class KeyStore(Protocol):
    """Thread-safe. All calls but those of the twin may raise `StoreUnavailable`, and take a store's time."""

    def data_key(self, subject: str) -> DataKey:
        """The key to seal with: the newest generation that lives; made where there is none.

        Any number of processes that ask at once get the same key.
        """
        ...

    def key_of(self, subject: str, generation: int) -> bytes:
        """The key to open with. Raises `Erased` where it was destroyed, `KeyMissing` where it never was here."""
        ...

    def destroy(self, subject: str) -> int:
        """Destroys every generation there is; the number of the last one destroyed, 0 where there never was a key.

        When it returns, `key_of` raises `Erased` for all of them, in every process that has no copy. Repeating it, also
        after a crash in the middle, finishes what is left and gives the same number.
        """
        ...

    def state(self, subject: str) -> KeyState: ...


class MasterKey(Protocol):
    """What wraps data keys: the seam for a key management service, which need not give its key away."""

    def wrap(self, key: bytes, context: bytes) -> bytes:
        """`context` binds the wrapped key to its place; `unwrap` demands the same."""
        ...

    def unwrap(self, wrapped: bytes, context: bytes) -> bytes:
        """Raises `SealInvalid` where it is not a key wrapped here under this context, `ConfigError` where it was
        wrapped under another master key."""
        ...

    def pseudonym_secret(self) -> bytes:
        """32 bytes; the same for ever, since pseudonyms are made with it."""
        ...
