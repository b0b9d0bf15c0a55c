"""The cheapest way to a version, against brute force."""

from __future__ import annotations

import itertools
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.consumers.weights.paths import (
    PathStep,
    StepKey,
    Ways,
    anchor_step,
    delta_step,
    known_versions,
    plan_path,
)
from rollwire.schemas.errors import WeightError
from rollwire.schemas.records import Claim, LinkObject, WeightLink, WeightVersion

CLAIM = Claim(key="k", size=1, sha256="00" * 32)


def event(
    version: int,
    base: int | None,
    stored: int = 10,
    *,
    anchor: bool = False,
    full: int = 100,
    coder: str = "",
    state: int | None = None,
) -> WeightVersion:
    return WeightVersion(
        model="m",
        lineage="L",
        version=version,
        kind="anchor" if base is None else "delta",
        base_version=base,
        step=version,
        manifest=CLAIM,
        anchor=CLAIM if anchor or base is None else None,
        checkpoint=None,
        state_digest=f"{version if state is None else state:064x}",
        full_bytes=full,
        stored_bytes=stored,
        changed_elements=0,
        total_elements=0,
        published_us=0,
        coder=coder,
    )


def link(
    base: int,
    version: int,
    stored: int = 10,
    *,
    coder: str = "gap",
    kind: Literal["skip", "inverse"] = "skip",
    lineage: str = "L",
    state: int | None = None,
    head: int = 1,
) -> WeightLink:
    return WeightLink(
        model="m",
        lineage=lineage,
        version=version,
        base_version=base,
        kind=kind,
        coder=coder,
        base_digest=f"{base:064x}",
        state_digest=f"{version if state is None else state:064x}",
        objects=(LinkObject(key="k", size=stored, sha256="00" * 32, head_bytes=head),),
        stored_bytes=stored,
        published_us=0,
    )


def gone(base: int | None, version: int) -> WeightLink:
    return WeightLink(
        model="m",
        lineage="L",
        version=version,
        base_version=base,
        kind="gone",
        coder="",
        base_digest="",
        state_digest="",
        objects=(),
        stored_bytes=0,
        published_us=0,
    )


def shape(path: list[PathStep]) -> list[str]:
    return [str(step) for step in path]


CHAIN = [event(0, None, 100), *(event(v, v - 1, anchor=v == 4) for v in range(1, 7))]
GAPS = [event(0, None, 100), *(event(v, v - 1, coder="gap") for v in range(1, 7))]


def test_deltas_while_they_are_cheap_and_anchors_for_newcomers() -> None:
    assert shape(plan_path(CHAIN, (), 2, 6)) == ["delta 2>3", "delta 3>4", "delta 4>5", "delta 5>6"]
    assert shape(plan_path(CHAIN, (), None, 6)) == ["anchor 4", "delta 4>5", "delta 5>6"]
    assert shape(plan_path(CHAIN, (), None, 0)) == ["anchor 0"]
    assert plan_path(CHAIN, (), 3, 3) == []
    assert shape(plan_path(CHAIN[::-1], (), None, 2)) == ["anchor 0", "delta 0>1", "delta 1>2"]


def test_dense_deltas_lose_to_an_anchor() -> None:
    dense = [event(0, None), *(event(v, v - 1, 60, anchor=v == 3) for v in range(1, 5))]
    assert shape(plan_path(dense, (), 0, 4)) == ["anchor 3", "delta 3>4"]
    assert shape(plan_path(dense, (), 2, 4)) == ["delta 2>3", "delta 3>4"]


def test_gap_deltas_run_backwards_and_context_deltas_by_their_inverse() -> None:
    path = plan_path(GAPS, (), 5, 3)
    assert shape(path) == ["delta 5>4", "delta 4>3"]
    assert all(step.backwards for step in path)
    assert [step.source.version for step in path] == [5, 4]
    context = [event(0, None, 100), *(event(v, v - 1, coder="context") for v in range(1, 7))]
    assert shape(plan_path(context, (), 6, 5)) == ["anchor 0", *(f"delta {v - 1}>{v}" for v in range(1, 6))]
    inverse = link(6, 5, coder="context", kind="inverse")
    assert shape(plan_path(context, [inverse], 6, 5)) == ["inverse 6>5"]
    with pytest.raises(WeightError):  # the context coder's inverse does not run backwards either
        plan_path(context[5:], [inverse], 5, 4)


def test_skips_are_taken_over_several_deltas_and_overshot_where_that_is_cheaper() -> None:
    skip = link(0, 4, 25)
    assert shape(plan_path(GAPS, [skip], 0, 5)) == ["skip 0>4", "delta 4>5"]
    assert shape(plan_path(GAPS, [skip], 4, 0)) == ["skip 4>0"]
    assert shape(plan_path(GAPS, [link(0, 4, 15)], 0, 3)) == ["skip 0>4", "delta 4>3"]
    assert shape(plan_path(GAPS, [link(0, 4, 50)], 0, 4)) == [f"delta {v - 1}>{v}" for v in range(1, 5)]


def test_a_link_of_other_states_or_another_lineage_is_passed_over() -> None:
    direct = ["delta 0>1", "delta 1>2"]
    for wrong in (link(0, 2, 1, lineage="M"), link(0, 2, 1, state=9), link(0, 9, 1), link(9, 2, 1)):
        assert shape(plan_path(GAPS, [wrong], 0, 2)) == direct


def test_what_is_gone_leads_nowhere_until_it_is_linked_again() -> None:
    skip = link(0, 2, 1)
    assert shape(plan_path(GAPS, [skip], 0, 2)) == ["skip 0>2"]
    assert shape(plan_path(GAPS, [skip, gone(0, 2)], 0, 2)) == ["delta 0>1", "delta 1>2"]
    assert shape(plan_path(GAPS, [skip, gone(0, 2), skip], 0, 2)) == ["skip 0>2"]
    with pytest.raises(WeightError):
        plan_path(GAPS, [gone(0, 1)], 0, 2)
    with pytest.raises(WeightError):  # backwards reads the same objects
        plan_path([*GAPS[1:], event(0, None, anchor=False)], [gone(0, 1), gone(None, 0)], 2, 0)
    with pytest.raises(WeightError, match="full snapshots"):
        plan_path(GAPS, [gone(None, 0)], None, 2)


def test_versions_of_one_state_are_joined_for_nothing() -> None:
    reverted = [*GAPS, event(7, 6, 10, state=3), event(8, 7, 10, state=8)]
    assert shape(plan_path(reverted, (), 3, 7)) == ["same 3>7"]
    assert shape(plan_path(reverted, (), 3, 8)) == ["same 3>7", "delta 7>8"]
    assert shape(plan_path(reverted, (), 7, 2)) == ["same 7>3", "delta 3>2"]
    assert sum(step.bytes for step in plan_path(reverted, (), 3, 7)) == 0


def test_a_slice_pays_heads_whole_and_its_share_of_the_rest() -> None:
    thin, thick = link(0, 2, 100, head=90), link(1, 2, 100, head=10)
    costs = {str(step): step.bytes for step in Ways(known_versions(GAPS), [thin, thick], 0.25)}
    assert costs["skip 0>2"] == 90 + 2
    assert costs["skip 1>2"] == 10 + 22
    assert "skip 2>1" not in costs  # the sums of what it does not hold are known forwards alone
    assert costs["anchor 0"] == 25


def test_unusable_steps_are_avoided() -> None:
    third = delta_step(CHAIN[3]).key
    assert shape(plan_path(CHAIN, (), 2, 6, avoid={third})) == ["anchor 4", "delta 4>5", "delta 5>6"]
    assert shape(plan_path(CHAIN, (), None, 5, avoid={anchor_step(CHAIN[4]).key}))[0] == "anchor 0"
    with pytest.raises(WeightError, match="no way from version 4 to version 6"):
        plan_path(CHAIN, (), 4, 6, avoid={StepKey("delta", 6, 5, "")})
    backwards = plan_path(GAPS, (), 2, 1)[0]
    assert backwards.key == delta_step(GAPS[2]).key  # the same objects


def test_no_way() -> None:
    with pytest.raises(WeightError, match="no way from nothing"):
        plan_path([event(3, 2)], (), None, 3)
    with pytest.raises(WeightError):
        plan_path(CHAIN, (), 1, 9)
    with pytest.raises(WeightError, match="known are none"):
        plan_path([], (), 1, 2)


def test_of_repeats_the_first_counts() -> None:
    assert plan_path([event(0, None), event(1, 0, 10), event(1, 0, 99)], (), 0, 1)[0].bytes == 10


@settings(deadline=None)
@given(st.data())
def test_costs_what_brute_force_finds(data: st.DataObject) -> None:
    versions = range(data.draw(st.integers(2, 4)))
    coders = st.sampled_from(["gap", "context"])
    events = []
    for v in versions:
        base = data.draw(st.one_of(st.none(), st.integers(0, v - 1))) if v else None
        events.append(
            event(
                v,
                base,
                data.draw(st.integers(0, 40)),
                anchor=data.draw(st.booleans()),
                full=data.draw(st.integers(0, 40)),
                coder=data.draw(coders),
                state=data.draw(st.sampled_from([v, 0])),
            )
        )
    ends = data.draw(st.lists(st.permutations(versions).map(lambda p: p[:2]), max_size=2))
    links = [
        link(
            a,
            b,
            data.draw(st.integers(1, 40)),
            coder=data.draw(coders),
            kind="skip" if a < b else "inverse",
            state=int(events[b].state_digest, 16),
        )
        for a, b in ends
    ]
    have, want = (
        data.draw(st.one_of(st.none(), st.sampled_from(versions))),
        data.draw(st.sampled_from(versions)),
    )
    ways = list(Ways(known_versions(events), links))
    best: int | None = 0 if have == want else None
    for length in range(1, len(versions) + 1):
        for walk in itertools.permutations(ways, length):
            at = have
            for step in walk:
                if step.base is not None and at != step.base:
                    break
                at = step.event.version
            else:
                cost = sum(step.bytes for step in walk)
                if at == want and (best is None or cost < best):
                    best = cost
    try:
        path = plan_path(events, links, have, want)
    except WeightError:
        assert best is None
    else:
        assert sum(step.bytes for step in path) == best
