from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

from rollwire.ops.demo.checks import BARS, checks, figures
from rollwire.ops.demo.tally import RunFacts, Tally
from rollwire.producers.environments.known import ENVIRONMENTS
from rollwire.schemas.golden import load_examples
from rollwire.schemas.records import Event, FleetStatus, PackedBatch, Rollout, Score, Segment, Span

LINEAGE = "0f8fad5b-d9cb-469f-a165-70867728950e"  # of the golden examples


def golden(topic: str, name: str, **changes: Any) -> Event:
    """A golden example with some fields changed."""
    event = next(example.event for example in load_examples(topic) if example.name == name)
    return msgspec.structs.replace(event, **changes)


def version(number: int) -> Event:
    return golden(
        "weight-versions",
        "delta",
        version=number,
        kind="delta" if number else "anchor",
        base_version=number - 1 if number else None,
        step=number,
        state_digest=f"digest-{number}",
        full_bytes=1_000,
        stored_bytes=150,
    )


def step(number: int) -> Event:
    return golden(
        "train-steps",
        "step",
        step=number,
        version=number,
        base_version=number - 1,
        tokens=100,
        max_lag=1,
        mismatch_no_replay=None,
        routes_differing=None,
        finished_us=1_000_000 * number,
    )


def rollout(*spans: tuple[int, int, int], task_id: str = "seen") -> Rollout:
    event = golden(
        "rollouts",
        "two-versions",
        spans=tuple(Span(version=v, start=a, end=b) for v, a, b in spans),
        task_id=task_id,
    )
    assert isinstance(event, Rollout)
    return event


def evaluation(suite: str, number: int, accuracy: float) -> Event:
    scores = (Score(name="accuracy", value=accuracy),)
    return golden("evaluations", "held-out", suite=suite, version=number, scores=scores)


def served(replica: str, number: int, digest: str | None = None) -> FleetStatus:
    event = golden(
        "fleet-status", "swapped", replica=replica, version=number, state_digest=digest or f"digest-{number}"
    )
    assert isinstance(event, FleetStatus)
    return event


def whole_run(steps: int = 250, environment: str = "countdown") -> Tally:
    tally = Tally(held_out_ids=frozenset({"held"}), lineage=LINEAGE)
    tally.add(version(0))
    for number in range(1, steps + 1):
        tally.add(step(number))
        tally.add(version(number))
    for suite, before, after in (("heldout", 0.2, 0.45), ("distinct", 0.1, 0.2)):
        tally.add(evaluation(f"{environment}.{suite}", 0, before))
        tally.add(evaluation(f"{environment}.{suite}", steps, after))
        tally.add(evaluation(f"{environment}.{suite}.quick", steps, 0.99))
    for replica in ("fleet-0", "evaluator-0"):
        tally.add(served(replica, steps))
    tally.add(rollout((0, 0, 1), (1, 1, 2)))
    tally.add(rollout((1, 0, 2)))
    tally.add(golden("group-fates", "trained"))
    return tally


def broken(
    facts: RunFacts,
    *,
    environment: str = "countdown",
    control: bool = False,
    steps: int = 250,
    ledger_gap: int = 0,
    wall_s: float = 300.0,
) -> set[str]:
    found = checks(
        facts,
        environment=environment,
        steps=steps,
        max_lag=3,
        ledger_gap=ledger_gap,
        wall_s=wall_s,
        control=control,
    )
    return {check.name for check in found if not check.ok}


def test_a_good_run_holds_every_check() -> None:
    facts = whole_run().facts("countdown")
    assert broken(facts) == set()
    assert facts.mixed_version_share == 0.5
    assert facts.gain(facts.heldout) == pytest.approx(0.25)
    assert facts.delta_pct == pytest.approx(15.0)
    assert facts.train_tokens_per_s == pytest.approx(100.0)


def test_each_broken_promise_breaks_its_check() -> None:
    facts = whole_run().facts("countdown")
    assert broken(facts, ledger_gap=1) == {"ledger"}
    assert broken(facts, wall_s=481) == {"wall time"}
    assert broken(facts, control=True) == {"control"}
    assert broken(replace(facts, heldout={0: 0.2, 250: 0.37})) == {"held-out gain"}
    assert broken(replace(facts, heldout={})) == {"held-out gain"}
    assert broken(replace(facts, distinct={0: 0.1, 250: 0.17})) == {"distinct gain"}
    assert broken(replace(facts, heldout_overlap=1)) == {"held out"}
    assert broken(replace(facts, heldout_tasks=511)) == {"held out"}
    assert broken(replace(facts, trained_lag_max=4)) == {"lag"}
    assert broken(replace(facts, mixed_version_share=0.04)) == {"swaps in flight"}


def test_a_hole_a_repeat_and_a_replica_left_behind_are_seen() -> None:
    hole = whole_run()
    del hole.versions[17]
    assert broken(hole.facts("countdown")) == {"holes"}
    repeat = whole_run()
    repeat.add(version(17))
    assert broken(repeat.facts("countdown")) == {"holes"}
    behind = whole_run()
    behind.add(served("fleet-0", 249))
    assert broken(behind.facts("countdown")) == {"replicas"}
    other_bits = whole_run()
    other_bits.add(served("fleet-0", 250, "another"))
    assert broken(other_bits.facts("countdown")) == {"replicas"}


def test_training_on_a_held_out_task_is_seen() -> None:
    tally = whole_run()
    tally.add(rollout((1, 0, 2), task_id="held"))
    assert broken(tally.facts("countdown")) == {"held out"}


def test_an_empty_run_holds_nothing_that_it_should_show() -> None:
    assert {"steps", "held out", "replicas", "held-out gain", "distinct gain"} <= broken(
        Tally(lineage=LINEAGE).facts("countdown")
    )


def test_a_short_run_is_not_judged_by_what_it_could_not_learn() -> None:
    assert broken(whole_run(steps=10).facts("countdown"), steps=10) == set()


def with_a_tool() -> Rollout:
    """Two prompt tokens, one sampled, two of a tool, one sampled."""
    kinds: list[tuple[Literal["prompt", "sampled", "tool"], int, int]] = [
        ("prompt", 0, 2),
        ("sampled", 2, 3),
        ("tool", 3, 5),
        ("sampled", 5, 6),
    ]
    event = golden(
        "rollouts",
        "two-versions",
        segments=tuple(Segment(kind=kind, start=start, end=end) for kind, start, end in kinds),
        loss_mask=bytes([0, 0, 1, 0, 0, 1]),
    )
    assert isinstance(event, Rollout)
    return event


def plan_of(*members: tuple[str, bytes]) -> PackedBatch:
    """A step plan whose only microbatch has these sequences, by rollout id and mask."""
    event = golden("packed-batches", "one-rank")
    assert isinstance(event, PackedBatch)
    starts = [0, *accumulate(len(mask) for _, mask in members)]
    micro = msgspec.structs.replace(
        event.microbatches[0],
        rollout_ids=tuple(rollout_id for rollout_id, _ in members),
        cu_seqlens=np.array(starts, "<i4").tobytes(),
        loss_mask=b"".join(mask for _, mask in members),
    )
    return msgspec.structs.replace(event, microbatches=(micro,))


def test_a_tool_result_that_is_trained_on_is_seen() -> None:
    called = with_a_tool()
    other = ("0197a1b2-0000-7000-8000-000000000001.0", bytes([0, 1, 1, 1]))
    tally = whole_run(environment="calculator")
    tally.add(called)
    tally.add(plan_of(other, (called.rollout_id, called.loss_mask), other))
    facts = tally.facts("calculator")
    assert (facts.tool_tokens, facts.tool_tokens_trained) == (2, 0)
    assert broken(facts, environment="calculator") == set()
    assert {f.name for f in figures(facts, ledger_gap=0, wall_s=1.0, control=False)} > {
        "demo.tool_tokens",
        "demo.tool_tokens_trained",
    }
    tally.add(plan_of(other, (called.rollout_id, bytes([0, 0, 1, 0, 1, 1]))))
    assert tally.facts("calculator").tool_tokens_trained == 1
    assert broken(tally.facts("calculator"), environment="calculator") == {"tool results"}
    slipped = whole_run(environment="calculator")
    slipped.add(msgspec.structs.replace(called, loss_mask=bytes([0, 0, 1, 1, 1, 1])))
    assert slipped.facts("calculator").tool_tokens_trained == 2
    never_called = whole_run(environment="calculator").facts("calculator")
    assert broken(never_called, environment="calculator") == {"tool results"}


def test_every_environment_has_its_bars() -> None:
    assert set(BARS) == set(ENVIRONMENTS)
    calculator = whole_run(environment="calculator")
    calculator.add(with_a_tool())
    facts = calculator.facts("calculator")
    for gain, ok in ((0.11, True), (0.09, False)):
        less = replace(facts, heldout={0: 0.2, 250: 0.2 + gain})
        assert broken(less, environment="calculator") == (set() if ok else {"held-out gain"})


def test_figures_have_their_names_and_leave_out_what_was_not_measured() -> None:
    facts = whole_run().facts("countdown")
    named = {f.name: f.value for f in figures(facts, ledger_gap=0, wall_s=300.0, control=False)}
    assert named["demo.heldout_gain"] == pytest.approx(0.25)
    assert named["demo.replica_digest_equal"] == 1.0
    assert "demo.control_gain" not in named
    assert "demo.routes_differing" not in named
    control = {f.name for f in figures(facts, ledger_gap=0, wall_s=300.0, control=True)}
    assert "demo.control_gain" in control
    assert "demo.heldout_gain" not in control
