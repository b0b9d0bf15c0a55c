"""An event's key (which decides order and partition) and its `ce_id` (the idempotency key), from its own fields.

`ce_id` is the natural key: writing the same fact twice gives the same id, so readers can drop the repeat.
CloudEvents wants it unique per source; ours is unique per event type, over all sources.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from rollwire.schemas import records as r

_Text = Callable[[Any], str]

KEYS: Final[dict[str, _Text]] = {
    "group_id": lambda e: e.group_id,
    "model": lambda e: e.model,
    "replica": lambda e: e.replica,
    "subject": lambda e: e.subject,
    "rank": lambda e: str(e.rank),
    "source.topic": lambda e: e.source.topic,
}
"""What a topic file may name as `key`."""

IDS: Final[dict[type[r.Event], _Text]] = {
    r.Rollout: lambda e: e.rollout_id,
    r.ProductionRollout: lambda e: e.rollout_id,
    r.Reward: lambda e: f"{e.rollout_id}/{e.source}/{e.verifier}/{e.verifier_version}",
    r.Feedback: lambda e: f"{e.tenant}/{e.feedback_id}",
    r.RoutingTrace: lambda e: f"{e.rollout_id}/{e.start_row}",
    r.Group: lambda e: e.group_id,
    r.GroupFate: lambda e: e.group_id,
    r.GroupClosed: lambda e: e.group_id,
    r.ProductionGroupClosed: lambda e: e.group_id,
    r.PackedBatch: lambda e: (
        f"{e.lineage}/{e.step}/{e.rank}" + ("" if e.newest_revert is None else f"/{e.newest_revert}")
    ),
    r.TrainStep: lambda e: f"{e.lineage}/{e.step}",
    r.WeightVersion: lambda e: f"{e.lineage}/{e.version}",
    r.WeightLink: lambda e: f"{e.lineage}/{e.version}/{e.base_version}/{e.kind}/{e.coder}",
    r.FleetStatus: lambda e: f"{e.fleet}/{e.replica}/{e.state}/{e.version}/{e.at_us}",
    r.Evaluation: lambda e: (
        f"{e.lineage}/{e.suite}/{e.version}/{e.replica}"
        if e.promotion is None
        else f"{e.lineage}/promotion/{e.promotion.channel}/{e.version}/{e.at_us}"
    ),
    r.Notice: lambda e: f"{e.model}/{e.name}/{e.at_us}",
    r.Erasure: lambda e: f"{e.subject}/{e.request_id}",
    r.DeadLetter: lambda e: f"{e.refused_by}/{e.source.topic}/{e.source.partition}/{e.source.offset}",
}
