"""Reverts of a lineage: which versions lead to which. Pure.

The versions of a lineage are numbered on and on. A revert is a version too: one higher than all before it, with the weights
of an older one.

    0  1  2  3  4  5                 version 6 reverts to 2: 3, 4 and 5 are abandoned, they do not lead to it
          └───────────── 6  7  8

A version leads to another one if the other was made from it, through however many steps and reverts. What was sampled from
a version that does not lead to the version of use comes from weights that were given up, and is not trained on (law 6).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from rollwire.schemas.records import WeightVersion


class Revert(NamedTuple):
    version: int  # that it made
    to: int  # the older one whose weights it has


class Reverts(NamedTuple):
    """All reverts of one lineage, by version, ascending."""

    known: tuple[Revert, ...] = ()

    def add(self, event: WeightVersion) -> Reverts:
        """With what `event` says; itself where that is not news. Events come in order of versions, repeats may."""
        if event.reverts_to is None or (self.known and event.version <= self.known[-1].version):
            return self
        return Reverts((*self.known, Revert(event.version, event.reverts_to)))

    @property
    def newest(self) -> int | None:
        """The version that the last revert made; None = there was none."""
        return self.known[-1].version if self.known else None

    def before(self, version: int) -> Revert | None:
        """The last revert that made `version` or an older one."""
        return next((one for one in reversed(self.known) if one.version <= version), None)

    def newest_at(self, version: int) -> int | None:
        """What a plan that is applied to `version` must say as its `newest_revert`."""
        found = self.before(version)
        return None if found is None else found.version

    def leads(self, version: int, to: int) -> bool:
        """Whether `to` is `version`, or was made from it."""
        while version <= to:
            found = self.before(to)
            if found is None or version >= found.version:
                return True
            to = found.to
        return False

    def passes_over(self, step: int, newest_revert: int | None) -> bool:
        """Whether the plan of `step` is never taken: the first revert that it did not know of came before its step."""
        after = next((one for one in self.known if one.version > (newest_revert or 0)), None)
        return after is not None and after.version <= step


NO_REVERTS: Final = Reverts()
