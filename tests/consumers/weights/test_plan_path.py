"""The cheapest way to a version, against brute force."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwire.consumers.weights.reader import PathStep, plan_path
from rollwire.schemas.errors import WeightError
from rollwire.schemas.records import Claim, WeightVersion

CLAIM = Claim(key="k", size=1, sha256="00" * 32)


def event(
    version: int, base: int | None, stored: int = 10, *, anchor: bool = False, full: int = 100
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
        state_digest=f"{version:064x}",
        full_bytes=full,
        stored_bytes=stored,
        changed_elements=0,
        total_elements=0,
        published_us=0,
    )


def shape(path: list[PathStep]) -> list[tuple[int, bool]]:
    return [(step.event.version, step.full) for step in path]


CHAIN = [event(0, None, 100), *(event(v, v - 1, anchor=v == 4) for v in range(1, 7))]


def test_deltas_while_they_are_cheap_and_anchors_for_newcomers() -> None:
    assert shape(plan_path(CHAIN, 2, 6)) == [(3, False), (4, False), (5, False), (6, False)]
    assert shape(plan_path(CHAIN, None, 6)) == [(4, True), (5, False), (6, False)]
    assert shape(plan_path(CHAIN, None, 0)) == [(0, True)]
    assert plan_path(CHAIN, 3, 3) == []
    assert shape(plan_path(CHAIN[::-1], None, 2)) == [(0, True), (1, False), (2, False)]


def test_dense_deltas_lose_to_an_anchor() -> None:
    dense = [event(0, None), *(event(v, v - 1, 60, anchor=v == 3) for v in range(1, 5))]
    assert shape(plan_path(dense, 0, 4)) == [(3, True), (4, False)]
    assert shape(plan_path(dense, 2, 4)) == [(3, False), (4, False)]


def test_unusable_steps_are_avoided() -> None:
    assert shape(plan_path(CHAIN, 2, 6, avoid={(3, False)})) == [(4, True), (5, False), (6, False)]
    assert shape(plan_path(CHAIN, None, 5, avoid={(4, True)}))[0] == (0, True)
    with pytest.raises(WeightError, match="no way from version 4 to version 6"):
        plan_path(CHAIN, 4, 6, avoid={(6, False)})


def test_no_way() -> None:
    with pytest.raises(WeightError, match="no way from nothing"):
        plan_path([event(3, 2)], None, 3)
    with pytest.raises(WeightError):
        plan_path(CHAIN, 1, 9)
    with pytest.raises(WeightError):
        plan_path([], 1, 2)


def test_of_repeats_the_first_counts() -> None:
    assert plan_path([event(0, None), event(1, 0, 10), event(1, 0, 99)], 0, 1)[0].event.stored_bytes == 10


@given(st.data())
def test_costs_what_brute_force_finds(data: st.DataObject) -> None:
    versions = range(data.draw(st.integers(2, 4)))
    events = []
    for v in versions:
        base = data.draw(st.one_of(st.none(), st.integers(0, v - 1))) if v else None
        stored = data.draw(st.integers(0, 40))
        full = data.draw(st.integers(0, 40))
        events.append(event(v, base, stored, anchor=data.draw(st.booleans()), full=full))
    have, want = data.draw(st.one_of(st.none(), st.sampled_from(versions))), max(versions)
    ways = [
        PathStep(e, full)
        for e in events
        for full in (False, True)
        if (e.anchor if full else e.base_version is not None)
    ]
    best: int | None = 0 if have == want else None
    for length in range(1, len(versions) + 1):
        for walk in itertools.permutations(ways, length):
            at = have
            for step in walk:
                if not step.full and at != step.event.base_version:
                    break
                at = step.event.version
            else:
                cost = sum(step.bytes for step in walk)
                if at == want and (best is None or cost < best):
                    best = cost
    try:
        cost = sum(step.bytes for step in plan_path(events, have, want))
    except WeightError:
        assert best is None
    else:
        assert cost == best
