"""One open group of live traffic: one answer and the reward of its feedback. Pure.

It is trained on among the others of its cohort, which only `pack` knows: so it leaves without an advantage, whatever its reward,
and also without a reward. An answer of which nobody said anything is part of the cohort, and counts against its coverage.
"""

from __future__ import annotations

from typing import Final

from rollwire.kernels.advantages import Baseline
from rollwire.schemas.records import Cut, Group, GroupFate, Member, Rollout
from rollwire.streams.assemble_group import OpenGroup

BASELINE: Final = "cohort"


class OpenAnswer(OpenGroup):
    """As its base, for a group of one whose rollout is a `ProductionRollout`."""

    __slots__ = ()
    decided_by = "assemble-production"

    @property
    def abandoned(self) -> bool:
        """Never: an answer that its reader cut off was given, and is judged by its feedback as every other."""
        return False

    def decide(
        self, cut: Cut, *, baseline: Baseline, keep_equal: bool, traces: bool, partial: bool
    ) -> Group | GroupFate:
        """A group as soon as there is a reward event, also one that says that there is no reward; `partial`: without one
        too. `baseline` and `keep_equal` are for groups that are compared within themselves."""
        first = self.first
        reward = None if first is None else self.rewards.get(first.index)
        if first is None or (reward is None and not partial):
            return self.fate(cut, "dropped", "incomplete", self._missing(traces=traces))
        return Group(
            group_id=self.group_id,
            model=first.model,
            lineage=first.lineage,
            environment=first.environment,
            task_id=first.task_id,
            group_size=first.group_size,
            baseline=BASELINE,
            members=(
                Member(
                    # In a group it stands as what it is there: a rollout of the same fields.
                    rollout=Rollout(**{name: getattr(first, name) for name in Rollout.__struct_fields__}),
                    reward=None if reward is None else reward.reward,
                    advantage=None,
                    trace=None,
                    signals=0 if reward is None else len(reward.evidence),
                ),
            ),
            cut=cut,
        )
