"""From which checkpoint, over which steps a version is trained again. Pure.

0 ── 1 ── 2 ── 3 ── 4 ── 5         checkpoints at 0 and 3; 5 is trained from 3 by the steps 4 and 5,
▣              ▣                   and 3 from 0 by 1, 2 and 3: a checkpoint of its own proves nothing
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rollwire.consumers.audit.rebuild_past import Past
from rollwire.schemas.records import TrainStep


class Way(NamedTuple):
    start: int  # the version whose checkpoint is restored
    steps: tuple[TrainStep, ...]  # in order; a revert among them changes no weights

    @property
    def trains(self) -> bool:
        """Whether steps lead to the version: else it is its own checkpoint, or version 0."""
        return bool(self.steps)


def way_back(past: Past, version: int, usable: Callable[[int], bool]) -> Way | None:
    """The way with the fewest steps, and at least one that trains where there is such a way; None: no checkpoint leads to
    the version. `usable`: whether a version has a checkpoint that can be restored."""
    steps: list[TrainStep] = []
    trained, at = False, version
    while not ((trained or at == 0) and usable(at)):
        step, made_from = past.steps.get(at), past.made_from(at)
        if at == 0 or step is None or made_from is None:
            return Way(version, ()) if usable(version) else None
        trained = trained or past.versions[at].reverts_to is None
        steps.append(step)
        at = made_from
    return Way(at, tuple(reversed(steps)))
