"""Several turns in the fleet: the next context is exactly what stands there, tool tokens are never trained on (C18, C19)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from rollwire.kernels.cost import CostModel
from rollwire.producers.emit import decode_record
from rollwire.producers.environments.calculator import (
    CALL_END_ID,
    END_ID,
    MAX_CALLS,
    MAX_NEW_TOKENS,
    VOCABULARY,
    Calculator,
    encode_text,
    result_of,
)
from rollwire.producers.fleet import FleetConfig, FleetReport, run_fleet
from rollwire.producers.verifier.verifier import VerifierConfig, run_verifier
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.records import Cut, DeadLetter, Event, Group, Reward, Rollout, RoutingTrace
from rollwire.schemas.routes import decode_ids
from rollwire.streams.assemble_config import AssembleConfig
from rollwire.streams.pack_layout import PlanFrame, lay_out
from rollwire.streams.run_assemble import run_assemble
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.engine import Sampled, SampleRequest
from rollwire.streams.seams.engine_memory import EXPERTS, LAYERS, TOP_K, MemoryEngine
from rollwire.streams.seams.environment import Turn
from rollwire.streams.seams.log import TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.turns import after_stretch
from rollwire.streams.seams.weights_memory import MemoryWeights

LINEAGE = "0197a1b2-0000-7000-8000-0000000000aa"
CALLING = {CALL_END_ID: 1.5, END_ID: 0.5}


class Calling(MemoryEngine):
    """Ends calls often, swaps often, and keeps what it was asked and what it returned, by request."""

    def __init__(self, weights: MemoryWeights, *, swap_every: int, max_running: int = 64) -> None:
        super().__init__(vocab_size=len(VOCABULARY), end_id=END_ID, max_running=max_running)
        self.asked: dict[str, list[SampleRequest]] = {}
        self.returned: dict[str, list[Sampled]] = {}
        self._weights = weights
        self._swap_every = swap_every
        self._steps = 0

    def log_probabilities(self, version: int, last_token: int) -> NDArray[np.float64]:
        logits_V = super().log_probabilities(version, last_token).copy()
        for token, bias in CALLING.items():
            logits_V[token] += bias
        normed_V: NDArray[np.float64] = logits_V - np.log(np.exp(logits_V).sum())
        return normed_V

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        for request in requests:
            self.asked.setdefault(request.request_id, []).append(request)
        super().submit(requests)

    def step(self) -> list[Sampled]:
        self._steps += 1
        if self._swap_every and self._steps % self._swap_every == 0:
            self._weights.offer(self.version + 1, {})
        return self._keep(super().step())

    def abort(self) -> list[Sampled]:
        return self._keep(super().abort())

    def _keep(self, sampled: list[Sampled]) -> list[Sampled]:
        for each in sampled:
            self.returned.setdefault(each.request_id, []).append(each)
        return sampled


def events(log: MemoryLog, topic: str) -> list[Event]:
    reader = log.reader()
    reader.assign({TopicPartition(topic, p): 0 for p in range(log.partitions(topic))})
    found: list[Event] = []
    while records := reader.poll(10_000, 0.0):
        found += [decode_record(record) for record in records]
    return found


def sampled_by(
    engine: Calling, weights: MemoryWeights, config: FleetConfig, enough: Callable[[MemoryLog], bool]
) -> tuple[MemoryLog, FleetReport]:
    """A fleet's whole life, ended as soon as `enough` holds."""
    log = MemoryLog({"rollouts": 4, "rewards": 4, "routing-traces": 4, "group-fates": 4})
    weights.offer(0, {})
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        fleet = pool.submit(
            run_fleet,
            log,
            engine,
            Calculator(),
            weights,
            config,
            model="policy",
            lineage=LINEAGE,
            prefix="t.",
            stop=stop,
        )
        deadline = time.monotonic() + 20.0
        while not enough(log) and not fleet.done() and time.monotonic() < deadline:
            stop.wait(0.01)
        stop.set()
        return log, fleet.result(timeout=20.0)


def written(count: int) -> Callable[[MemoryLog], bool]:
    return lambda log: len(events(log, "rollouts")) >= count


def rollouts_of(log: MemoryLog) -> list[Rollout]:
    return [event for event in events(log, "rollouts") if isinstance(event, Rollout)]


def check_against_engine(rollout: Rollout, engine: Calling) -> None:
    """Everything a rollout says is what the engine was asked and returned, and what the tool said between."""
    calculator = Calculator()
    asked = engine.asked[rollout.rollout_id]
    returned = [each for each in engine.returned[rollout.rollout_id] if each.token_ids.size]
    ids_T = np.frombuffer(rollout.token_ids, np.uint8).astype(np.int64)
    mask_T = np.frombuffer(rollout.loss_mask, np.uint8)
    stretches = [s for s in rollout.segments if s.kind == "sampled"]
    assert [s.kind for s in rollout.segments] == ["prompt", *["sampled", "tool"] * len(stretches)][:-1]
    assert len(stretches) == len(returned)
    for segment, request, sampled in zip(stretches, asked, returned, strict=False):
        assert np.array_equal(request.prompt_ids, ids_T[: segment.start])
        assert np.array_equal(sampled.token_ids, ids_T[segment.start : segment.end])
    assert (
        np.frombuffer(rollout.logprobs, "<f4").tolist()
        == np.concatenate([each.logprobs for each in returned]).tolist()
    )
    versions_S = np.concatenate([[span.version] * (span.end - span.start) for span in rollout.spans])
    assert np.array_equal(versions_S, np.concatenate([each.versions for each in returned]))
    for segment in rollout.segments:
        assert (mask_T[segment.start : segment.end] == (segment.kind == "sampled")).all()
    for before, tool in zip(stretches, [s for s in rollout.segments if s.kind == "tool"], strict=False):
        call = calculator.decode(ids_T[before.start : before.end])
        assert call.endswith("]")
        assert calculator.decode(ids_T[tool.start : tool.end]) == result_of(call)
    assert ids_T.size - rollout.segments[0].end <= MAX_NEW_TOKENS


@pytest.mark.parametrize("swap_every", [0, 3])
def test_turns_are_written_as_they_were_sampled(swap_every: int) -> None:
    weights = MemoryWeights()
    engine = Calling(weights, swap_every=swap_every)
    log, report = sampled_by(engine, weights, FleetConfig(max_open_groups=32, group_size=8), written(256))
    rollouts = rollouts_of(log)
    assert len(rollouts) == report.written == 256
    assert report.refused == 0
    assert report.tokens == sum(len(rollout.logprobs) // 4 for rollout in rollouts)
    for rollout in rollouts:
        check_against_engine(rollout, engine)
    turns = [sum(s.kind == "sampled" for s in rollout.segments) for rollout in rollouts]
    assert set(turns) == set(range(1, MAX_CALLS + 2))
    assert turns.count(1) < 200
    mixed = [rollout for rollout in rollouts if len(rollout.spans) > 1]
    assert len(mixed) > 100 if swap_every else not mixed
    # Every stretch draws with a seed of its own: else equal contexts would repeat the first stretch's draws.
    assert all(len({r.seed for r in asked}) == len(asked) for asked in engine.asked.values())


def test_c18_c19_a_position_has_one_row_and_keeps_the_first_that_was_used() -> None:
    weights = MemoryWeights()
    engine = Calling(weights, swap_every=2)
    log, _ = sampled_by(engine, weights, FleetConfig(max_open_groups=16, group_size=8), written(128))
    traces = {e.rollout_id: e for e in events(log, "routing-traces") if isinstance(e, RoutingTrace)}
    differing = 0
    for rollout in rollouts_of(log):
        trace = traces[rollout.rollout_id]
        assert (trace.start_row, trace.rows) == (0, len(rollout.loss_mask) - 1)
        assert trace.data is not None
        ids = decode_ids(trace.encoding, trace.data, trace.rows * LAYERS * TOP_K, EXPERTS)
        routes_RLK = ids.reshape(trace.rows, LAYERS, TOP_K)
        row = 0
        for sampled in (each for each in engine.returned[rollout.rollout_id] if each.token_ids.size):
            assert sampled.routes is not None
            assert (sampled.routes < EXPERTS).all()
            differing += not np.array_equal(sampled.routes[:row], routes_RLK[:row])
            # A stretch's last token was no input yet: its row is the next turn's real one, not an invented one.
            assert np.array_equal(sampled.routes[row:], routes_RLK[row : len(sampled.routes)])
            row = len(sampled.routes)
        assert row == trace.rows
    assert differing > 20  # later turns did read the prefix under other weights, and it did not count


def test_a_stop_between_turns_finishes_or_hands_back_whole_rollouts() -> None:
    class Slow(Calling):
        def step(self) -> list[Sampled]:
            time.sleep(0.02)
            return super().step()

    weights = MemoryWeights()
    engine = Slow(weights, swap_every=3, max_running=48)
    config = FleetConfig(max_open_groups=12, group_size=8, drain_s=0.2)

    def second_turns(_: MemoryLog) -> bool:
        return sum(len(asked) > 1 for asked in list(engine.asked.values())) >= 4

    log, report = sampled_by(engine, weights, config, second_turns)
    rollouts = rollouts_of(log)
    aborted = [rollout for rollout in rollouts if rollout.finish_reason == "abort"]
    assert report.handed_back >= len(aborted) > 0
    assert engine.running == 0
    for rollout in rollouts:
        check_against_engine(rollout, engine)
        assert rollout.segments[-1].kind == "sampled"


def test_sampled_and_tool_tokens_share_one_budget() -> None:
    calculator = Calculator()
    call = encode_text("[47*38]")
    goes_on = after_stretch(calculator, "", call, call.size, "stop")
    assert goes_on.finish_reason is None
    assert calculator.decode(goes_on.tool_ids) == "1786"
    assert goes_on.max_new_tokens == MAX_NEW_TOKENS - 7 - 4
    last = after_stretch(calculator, "", call, MAX_NEW_TOKENS - 5, "stop")
    assert (last.finish_reason, last.max_new_tokens) == (None, 1)
    for used in (MAX_NEW_TOKENS - 4, MAX_NEW_TOKENS):
        full = after_stretch(calculator, "", call, used, "stop")
        assert (full.finish_reason, full.tool_ids.size) == ("length", 0)
    assert after_stretch(calculator, "", np.append(call, END_ID), 8, "stop").finish_reason == "stop"


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_a_stretch_that_did_not_stop_has_no_next_one(reason: str) -> None:
    class Unasked(Calculator):
        def step(self, task: str, sampled_ids: NDArray[np.int64]) -> Turn:
            raise AssertionError("nothing to ask")

    assert after_stretch(Unasked(), "", encode_text("[1]"), 3, reason).finish_reason == reason


def test_the_verifier_scores_the_whole_trajectory_and_plans_leave_the_tools_out() -> None:
    """Fleet, verifier and assemble on one log: every rollout gets the reward of all its turns together; in the step plan
    of the groups every sampled token has a loss, and no other."""
    log = MemoryLog({name: spec.partitions for name, spec in TOPICS.items()})
    stop, stop_fleet = threading.Event(), threading.Event()
    weights = MemoryWeights()
    weights.offer(0, {})
    engine = Calling(weights, swap_every=4)
    deadline = time.monotonic() + 30.0
    with ThreadPoolExecutor(3) as pool:
        verifier = pool.submit(
            run_verifier, log, Calculator(), VerifierConfig(poll_s=0.05), prefix="t.", stop=stop
        )
        assemble = pool.submit(
            run_assemble,
            log,
            AssembleConfig(equal_rewards="keep"),
            prefix="t.",
            partitions=None,
            stop=stop,
            clock=SystemClock(),
        )
        fleet = pool.submit(
            run_fleet,
            log,
            engine,
            Calculator(),
            weights,
            FleetConfig(max_open_groups=64, group_size=4),
            model="policy",
            lineage=LINEAGE,
            prefix="t.",
            stop=stop_fleet,
        )
        while len(events(log, "rewards")) < 128 and time.monotonic() < deadline and not fleet.done():
            stop.wait(0.02)
        stop_fleet.set()
        report = fleet.result(timeout=15.0)
        while len(events(log, "groups")) < report.slots.submitted and time.monotonic() < deadline:
            stop.wait(0.02)
        stop.set()
        verifier.result(timeout=15.0)
        assemble.result(timeout=15.0)
    calculator = Calculator()
    rewards = {e.rollout_id: e for e in events(log, "rewards") if isinstance(e, Reward)}
    rollouts = rollouts_of(log)
    assert len(rollouts) == len(rewards) == report.written >= 128
    for rollout in rollouts:
        check_against_engine(rollout, engine)
        sampled_S = np.concatenate([s.token_ids for s in engine.returned[rollout.rollout_id]], dtype=np.int64)
        verdict = calculator.score(rollout.task, sampled_S, rollout.finish_reason)
        reward = rewards[rollout.rollout_id]
        assert (reward.reward, reward.outcome) == (verdict.reward, verdict.outcome)
    assert {reward.outcome for reward in rewards.values()} >= {"no number", "too many calls"}
    assert [e for e in events(log, "dead-letters") if isinstance(e, DeadLetter)] == []
    groups = [e for e in events(log, "groups") if isinstance(e, Group)]
    assert len(groups) == report.slots.submitted
    cut = Cut(inputs=(), clock_us=1_767_225_600_000_000)
    frame = PlanFrame("policy", LINEAGE, 1, 10**6, 2, 4_096, 10**6, CostModel(1.0, 0.0), cut)
    by_id = {rollout.rollout_id: rollout for rollout in rollouts}
    planned: list[str] = []
    tool_tokens = 0
    for batch in lay_out(groups, frame):
        for micro in batch.microbatches:
            starts_B1 = np.frombuffer(micro.cu_seqlens, "<i4")
            for rollout_id, start in zip(micro.rollout_ids, starts_B1, strict=False):
                planned.append(rollout_id)
                for segment in by_id[rollout_id].segments:
                    mask = micro.loss_mask[start + segment.start : start + segment.end]
                    assert mask == (b"\1" if segment.kind == "sampled" else b"\0") * len(mask)
                    tool_tokens += len(mask) if segment.kind == "tool" else 0
    assert sorted(planned) == sorted(by_id)
    assert tool_tokens > 50
