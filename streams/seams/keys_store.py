"""The key store over an object store, which has no transactions: only create-only puts and deletes.

    keys/<subject>/<generation>          the data key, wrapped by the master key, bound to this place
    keys/<subject>/<generation>.erased   the tombstone: this generation is destroyed, for ever

A key lives where its object is there and its tombstone is not. Destroying writes the tombstone *first* and deletes the
key after; whoever makes a key looks for the tombstone *after* its object is there. So whatever the order, a creator that
was overtaken by an erasure sees the tombstone, takes its object back and goes on to the next generation: a key that
`data_key` has given out stood in the store without a tombstone, and every later destruction deletes it. A crash between
tombstone and deletion leaves a key that no reader takes, and the repeated call deletes it.
"""

from __future__ import annotations

import re
import secrets
from typing import Final

from rollwire.kernels.seal import KEY_BYTES
from rollwire.schemas.errors import Erased, KeyMissing, ObjectConflict, ObjectMissing, StoreUnavailable
from rollwire.streams.seams.keys import DataKey, KeyState, MasterKey
from rollwire.streams.seams.keys_memory import erased, missing
from rollwire.streams.seams.store import PurgingStore

KEY_PREFIX: Final = "keys/"
_TOMBSTONE: Final = b'{"erased": true}\n'  # always the same bytes: a repeat is told that they are there
_NAME: Final = re.compile(r"([1-9][0-9]{0,8})(\.erased)?")
_TRIES: Final = 32


class StoredKeys:
    """Thread-safe. Asks the store at every call: `keys_cached.CachedKeys` in front of it remembers."""

    def __init__(self, store: PurgingStore, master: MasterKey) -> None:
        self._store = store
        self._master = master

    def data_key(self, subject: str) -> DataKey:
        for _ in range(_TRIES):  # each further try means that the person was erased meanwhile
            state = self.state(subject)
            if state.live:
                generation = state.live[-1]
            else:
                generation = max(state.destroyed, default=0) + 1
                self._make(subject, generation)
            try:
                return DataKey(generation, self.key_of(subject, generation))
            except Erased:
                # Ours or another's, made under a tombstone that the listing had not shown yet. Nobody has used it.
                self._store.purge(_key(subject, generation))
        raise StoreUnavailable(
            f"the data key of {subject} was destroyed {_TRIES} times while it was made: what erases it in a loop?"
        )

    def key_of(self, subject: str, generation: int) -> bytes:
        place = _key(subject, generation)
        try:
            wrapped = self._store.get(place)
        except ObjectMissing:
            wrapped = None
        # After the get: a key read before its tombstone was written was alive when it was read.
        if self._store.head(_tombstone(subject, generation)) is not None:
            raise Erased(erased(subject, generation))
        if wrapped is None:
            raise KeyMissing(missing(subject, generation))
        return self._master.unwrap(wrapped, place.encode())

    def destroy(self, subject: str) -> int:
        present, tombstones = self._generations(subject)
        # What is made from here on is of a person who came again: chasing it might never end. The oldest first, so that
        # the newest lives until all older ones are dead, and nobody is ever given an older one.
        for generation in sorted(present | tombstones):
            if generation not in tombstones:
                self._store.create(_tombstone(subject, generation), _TOMBSTONE)
            # Of a tombstoned one too: an earlier call may have died before the last of its versions was gone.
            self._store.purge(_key(subject, generation))
        return max(present | tombstones, default=0)

    def state(self, subject: str) -> KeyState:
        present, tombstones = self._generations(subject)
        return KeyState(tuple(sorted(present - tombstones)), tuple(sorted(tombstones)))

    def _generations(self, subject: str) -> tuple[set[int], set[int]]:
        """Those whose key is there, and those whose tombstone is."""
        folder = f"{KEY_PREFIX}{subject}/"
        present: set[int] = set()
        tombstones: set[int] = set()
        for found in self._store.list(folder):
            if (name := _NAME.fullmatch(found.key.removeprefix(folder))) is not None:
                (tombstones if name[2] else present).add(int(name[1]))
        return present, tombstones

    def _make(self, subject: str, generation: int) -> None:
        """A new key, unless another process made one first: the object decides."""
        place = _key(subject, generation)
        wrapped = self._master.wrap(secrets.token_bytes(KEY_BYTES), place.encode())
        try:
            self._store.create(place, wrapped)
        except (
            ObjectConflict,
            ObjectMissing,
        ):  # missing: made by another, and destroyed before it could be compared
            return


def _key(subject: str, generation: int) -> str:
    return f"{KEY_PREFIX}{subject}/{generation}"


def _tombstone(subject: str, generation: int) -> str:
    return f"{_key(subject, generation)}.erased"
