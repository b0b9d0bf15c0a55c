"""A trajectory that branches or is summarised: each sampled token is trained on exactly once, or its group is not trained on."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.kernels.cost import CostModel
from rollwire.producers.emit import decode_record, outgoing
from rollwire.producers.trajectory import Origin, Trajectory
from rollwire.schemas.errors import ConfigError, Refused
from rollwire.schemas.ids import new_group_id
from rollwire.schemas.records import Cut, Group, GroupFate, Reward, Rollout
from rollwire.streams.assemble_group import OpenGroup
from rollwire.streams.pack_layout import PlanFrame, lay_out
from rollwire.streams.seams.engine import Sampled
from rollwire.streams.seams.environment import Task
from rollwire.streams.seams.log import Record
from rollwire.streams.sharing import check_sharing

NOW_US = 1_767_225_600_000_000
GROUP = new_group_id(NOW_US, 7)
CUT = Cut(inputs=(), clock_us=NOW_US)
PROMPT = np.array([1, 2, 3], dtype=np.int64)
TOOL_ID = 9  # every sampled token gets an id of its own, so that it can be told wherever it turns up
ORIGIN = Origin(
    model="policy",
    lineage="0197a1b2-0000-7000-8000-0000000000aa",
    environment="calculator",
    fleet="fleet",
    replica="fleet-0",
    token_dtype="u4",
    temperature=1.0,
    num_experts=8,
    moe_layers=None,
)
FRAME = PlanFrame("policy", ORIGIN.lineage, 1, 50, 2, 4_096, 50, CostModel(1.0, 0.0), CUT)


class Making:
    """Members of one group being made, with a fresh id for each sampled token."""

    def __init__(self, size: int) -> None:
        task = Task("task", "{}", PROMPT)
        self.size = size
        self.next_id = 100
        self.version = 0
        self.members = [Trajectory(GROUP, 0, size, task, 0, NOW_US)]

    def sample(self, member: int, count: int, *, reason: str = "stop") -> None:
        """One stretch, sampled by two versions where it is long enough; routes as an engine returns them."""
        one = self.members[member]
        ids = np.arange(self.next_id, self.next_id + count, dtype=np.int64)
        self.next_id += count
        versions = self.version + (np.arange(count) >= 2).astype(np.int64)
        self.version = int(versions[-1])
        rows = one.token_ids.size + count - 1
        routes = np.tile(np.array([rows % 8, (rows + 1) % 8], np.uint8), (rows, 2, 1))
        one.add_sampled(Sampled("r", ids, -ids.astype(np.float32), versions, routes, reason))

    def finished(self) -> dict[int, Rollout]:
        """As they come out of the codec."""
        made: dict[int, Rollout] = {}
        for member in self.members:
            rollout, trace = member.finish(ORIGIN, "stop", NOW_US)
            assert rollout is not None
            assert trace is not None
            assert (trace.rows, trace.tokens) == (len(rollout.loss_mask) - 1, len(rollout.loss_mask))
            out = outgoing(rollout, source="test", time_us=NOW_US)
            decoded = decode_record(Record(out.topic, 0, 0, 0, out.key, out.value, out.headers))
            assert decoded == rollout
            made[member.index] = rollout
        return made


def reward(rollout: Rollout, value: float | None) -> Reward:
    return Reward(
        rollout_id=rollout.rollout_id,
        group_id=GROUP,
        reward=value,
        components=(),
        outcome="scored",
        source="verifier",
        verifier="test",
        verifier_version="1",
        evidence=(),
        scored_us=NOW_US,
    )


def decided(rollouts: dict[int, Rollout], rewards: dict[int, float | None]) -> Group | GroupFate:
    """What `assemble` makes of a group, once everything has come."""
    group = OpenGroup(GROUP, NOW_US)
    record = Record("rewards", 0, 0, 0, b"", b"", ())
    for index, rollout in rollouts.items():
        group.take_rollout(index, rollout)
    for index, value in rewards.items():
        group.take_reward(record, reward(rollouts[index], value))
    return group.decide(CUT, baseline="mean", keep_equal=False, traces=False, partial=True)


def trained_ids(group: Group) -> Counter[int]:
    """Every token that the step plan of the group has a loss on, and that loss's own logprob and version."""
    seen: Counter[int] = Counter()
    for batch in lay_out([group], FRAME):
        for micro in batch.microbatches:
            tokens_T = np.frombuffer(micro.token_ids, "<u4")
            ids_S = tokens_T[np.frombuffer(micro.loss_mask, np.uint8) != 0]
            assert np.array_equal(np.frombuffer(micro.logprobs, "<f4"), -ids_S.astype(np.float32))
            assert np.frombuffer(micro.versions, "<i8").size == ids_S.size
            seen.update(ids_S.tolist())
    return seen


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_sampled_token_is_trained_on_exactly_once(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 8))
    making = Making(size)
    making.sample(0, data.draw(st.integers(1, 5)))
    while len(making.members) < size:
        parent = data.draw(st.integers(0, len(making.members) - 1))
        one, index = making.members[parent], len(making.members)
        kind = data.draw(st.sampled_from(["branch", "branch", "summary", "fresh"]))
        if kind == "branch":
            at = data.draw(st.integers(PROMPT.size + 1, one.token_ids.size))
            making.members.append(one.branch(index, at, index, NOW_US))
        elif kind == "summary":
            making.sample(parent, data.draw(st.integers(2, 4)))
            end = one.token_ids.size
            making.members.append(one.summarised(index, end - 2, end, index, NOW_US))
        else:
            making.members.append(Trajectory(GROUP, index, size, one.task, index, NOW_US))
        for turn in range(data.draw(st.integers(1, 3))):
            if turn:
                making.members[index].add_tool(np.full(data.draw(st.integers(1, 3)), TOOL_ID, np.int64))
            making.sample(index, data.draw(st.integers(1, 5)))
    rollouts = making.finished()
    group = decided(rollouts, {i: float(i == 0) for i in rollouts})
    assert isinstance(group, Group)
    assert trained_ids(group) == dict.fromkeys(range(100, making.next_id), 1)


def forked() -> tuple[Making, dict[int, Rollout]]:
    """0: three tokens, a tool, three more. 1: branches from 0 behind the tool. 2: has a summary of 1. 3: on its own."""
    making = Making(4)
    making.sample(0, 3)
    making.members[0].add_tool(np.array([TOOL_ID, TOOL_ID]))
    making.sample(0, 3)
    making.members.append(making.members[0].branch(1, 9, 1, NOW_US))
    making.sample(1, 4)
    making.members.append(making.members[1].summarised(2, 10, 12, 2, NOW_US))
    making.sample(2, 3)
    making.members.append(Trajectory(GROUP, 3, 4, making.members[0].task, 3, NOW_US))
    making.sample(3, 3)
    return making, making.finished()


def test_a_fork_and_a_summary_share_their_spans() -> None:
    _, rollouts = forked()
    parent, branch, summary = rollouts[0], rollouts[1], rollouts[2]
    assert [s.kind for s in branch.segments] == ["prompt", "sampled", "tool", "sampled", "sampled"]
    assert branch.token_ids[: 9 * 4] == parent.token_ids[: 9 * 4]
    assert branch.loss_mask == bytes([0] * 9 + [1] * 4)
    assert parent.loss_mask == bytes([0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1])
    assert branch.logprobs[: 4 * 4] == parent.logprobs[: 4 * 4]
    assert [(run.rollout_id, run.from_start, run.start, run.end) for run in branch.shared] == [
        (parent.rollout_id, 3, 3, 9)
    ]
    assert [s.kind for s in summary.segments] == ["prompt", "summary", "sampled"]
    assert summary.loss_mask == bytes([0] * 5 + [1] * 3)
    assert (
        len(summary.logprobs) == 3 * 4
    )  # of its own tokens alone: the summary was sampled in another context
    assert [(run.rollout_id, run.from_start, run.start, run.end) for run in summary.shared] == [
        (branch.rollout_id, 10, 3, 5)
    ]


@pytest.mark.parametrize(
    ("member", "change", "told"),
    [
        (1, {"loss_mask": bytes([0] * 8 + [1] * 5)}, "trained on 2 times"),
        (0, {"loss_mask": bytes([0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1])}, "trained on 0 times"),
        (0, {"loss_mask": bytes(11)}, "trained on 0 times"),
        (1, {"token_ids": np.arange(13, dtype="<u4").tobytes()}, "other tokens"),
        (1, {"logprobs": np.zeros(8, "<f4").tobytes()}, "another logprob"),
        (0, {"spans": ()}, "another version"),
    ],
)
def test_a_shared_run_that_is_not_what_it_says_is_seen(
    member: int, change: dict[str, object], told: str
) -> None:
    _, rollouts = forked()
    check_sharing(rollouts)
    if change == {"spans": ()}:
        spans = tuple(msgspec.structs.replace(s, version=s.version + 1) for s in rollouts[member].spans)
        change = {"spans": spans}
    changed = {**rollouts, member: msgspec.structs.replace(rollouts[member], **change)}
    with pytest.raises(Refused, match=told) as caught:
        check_sharing(changed)
    assert caught.value.reason == "sharing_invalid"
    fate = decided(changed, {0: 1.0, 1: 0.0, 2: 0.0, 3: 0.0})
    assert isinstance(fate, GroupFate)
    assert (fate.fate, fate.reason) == ("dropped", "sharing_invalid")


def test_a_run_behind_its_origins_end_is_seen() -> None:
    _, rollouts = forked()
    shared = (msgspec.structs.replace(rollouts[2].shared[0], from_start=12),)
    with pytest.raises(Refused, match="behind the end"):
        check_sharing({**rollouts, 2: msgspec.structs.replace(rollouts[2], shared=shared)})


def test_without_its_origin_a_branch_is_not_trained_on() -> None:
    """The member that owns the shared tokens cannot be scored: they would be trained on by nobody."""
    _, rollouts = forked()
    fate = decided(rollouts, {0: None, 1: 1.0, 2: 0.0, 3: 0.0})
    assert isinstance(fate, GroupFate)
    assert (fate.fate, fate.reason) == ("dropped", "sharing_invalid")
    assert "not trained on" in fate.detail
    # A branch that cannot be scored takes nothing from the others but what hangs on it.
    group = decided(rollouts, {0: 1.0, 1: 0.0, 2: None, 3: 0.0})
    assert isinstance(group, Group)
    assert max(trained_ids(group).values()) == 1
    fate = decided(rollouts, {0: 1.0, 1: None, 2: 0.0, 3: 0.0})
    assert isinstance(fate, GroupFate)
    assert fate.reason == "sharing_invalid"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"start": 4, "end": 4}, "shared run"),
        ({"start": 0, "end": 14}, "shared run"),
        ({"from_start": -1}, "shared run"),
        ({"end": 10}, "mask trains"),
        ({"rollout_id": f"{GROUP}.1"}, "not before it"),
        ({"rollout_id": f"{GROUP}.3"}, "not before it"),
        ({"rollout_id": f"{new_group_id(NOW_US, 8)}.0"}, "not of its group"),
        ({"rollout_id": "elsewhere"}, "UUIDv7"),
    ],
)
def test_the_codec_refuses_a_shared_run_that_cannot_be(change: dict[str, object], told: str) -> None:
    _, rollouts = forked()
    shared = (msgspec.structs.replace(rollouts[1].shared[0], **change),)
    with pytest.raises(Refused, match=told):
        outgoing(msgspec.structs.replace(rollouts[1], shared=shared), source="test", time_us=NOW_US)


def test_runs_that_overlap_are_refused() -> None:
    _, rollouts = forked()
    run = rollouts[1].shared[0]
    again = msgspec.structs.replace(run, start=run.end - 1, end=run.end)
    with pytest.raises(Refused, match="shared run"):
        outgoing(msgspec.structs.replace(rollouts[1], shared=(run, again)), source="test", time_us=NOW_US)


def test_forks_and_summaries_that_cannot_be_are_errors() -> None:
    making, _ = forked()
    first = making.members[0]
    for at in (0, 3, 12):
        with pytest.raises(ConfigError, match="no fork"):
            first.branch(1, at, 1, NOW_US)
    for index in (0, 4):
        with pytest.raises(ConfigError, match="later"):
            first.branch(index, 5, 1, NOW_US)
    for start, end in ((2, 4), (5, 7), (4, 4), (8, 12)):
        with pytest.raises(ConfigError, match="one sampled stretch"):
            first.summarised(1, start, end, 1, NOW_US)


def test_a_branch_that_sampled_nothing_hands_nothing_back() -> None:
    making, _ = forked()
    branch = making.members[0].branch(1, 9, 1, NOW_US)
    assert branch.finish(ORIGIN, "abort", NOW_US).rollout is None
    branch.add_tool(np.array([TOOL_ID]))
    assert branch.finish(ORIGIN, "abort", NOW_US).rollout is None
