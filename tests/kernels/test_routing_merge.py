"""Traces of several turns as one: boundaries, resumed requests, holes (C17, C18, C19)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rollwire.kernels.routing.merge import RouteMerge
from rollwire.schemas.errors import ConfigError


def rows(start: int, end: int, turn: int = 0) -> NDArray[Any]:
    """Row t of a turn: experts t and t + 1 + turn, of one layer."""
    t = np.arange(start, end)
    return np.stack([t, t + 1 + turn], axis=1)[:, None, :]


@pytest.mark.parametrize(("given_rows", "last_row", "good"), [
    (6, False, True), (7, True, True), (5, False, False), (8, False, False), (5, True, False), (8, True, False),
    (7, False, False), (6, True, False),
])  # fmt: skip
def test_c17_prompt_4_and_3_sampled(given_rows: int, last_row: bool, good: bool) -> None:
    merge = RouteMerge()
    if not good:
        with pytest.raises(ConfigError, match="rows of routes"):
            merge.add(rows(0, given_rows), start_row=0, tokens=7, last_row=last_row, versions=1)
        assert merge.empty
        return
    merge.add(rows(0, given_rows), start_row=0, tokens=7, last_row=last_row, versions=1)
    merged = merge.merged(7)
    assert merged.recorded_N.tolist() == [True] * 6 + [last_row]
    assert (merged.ids_NLK[6] == -1).all() != last_row


def test_c17_a_prompt_alone() -> None:
    for count, last_row in ((3, False), (4, True)):
        merge = RouteMerge()
        merge.add(rows(0, count), start_row=0, tokens=4, last_row=last_row, versions=1)
        assert merge.merged(4).recorded_N.tolist() == [True, True, True, last_row]


def test_c18_the_boundary_row_comes_from_the_next_turn() -> None:
    merge = RouteMerge()
    merge.add(rows(0, 5), start_row=0, tokens=6, last_row=False, versions=1)
    assert merge.merged(6).recorded_N.tolist() == [True] * 5 + [False]
    merge.add(rows(0, 7, turn=1), start_row=0, tokens=8, last_row=False, versions=2)
    merged = merge.merged(8)
    assert (merged.ids_NLK[:5] == rows(0, 5)).all()
    assert (merged.ids_NLK[5:7] == rows(5, 7, turn=1)).all()
    assert (merged.ids_NLK[7] == -1).all()
    assert merged.versions_N.tolist() == [1] * 5 + [2, 2, -1]


def test_c18_a_row_that_an_engine_left_open_is_filled_by_the_next_turn() -> None:
    first = rows(0, 5)
    first[3] = -1
    merge = RouteMerge()
    merge.add(first, start_row=0, tokens=6, last_row=False, versions=1)
    assert merge.merged(5).recorded_N.tolist() == [True, True, True, False, True]
    merge.add(rows(0, 7, turn=1), start_row=0, tokens=8, last_row=False, versions=2)
    merged = merge.merged(7)
    assert (merged.ids_NLK[3] == rows(3, 4, turn=1)).all()
    assert (merged.ids_NLK[4] == rows(4, 5)).all()
    assert merged.versions_N.tolist() == [1, 1, 1, 2, 1, 2, 2]


def test_c19_a_resumed_rollout_returns_everything_again() -> None:
    merge = RouteMerge()
    merge.add(rows(0, 6), start_row=0, tokens=7, last_row=False, versions=3)
    with pytest.raises(ConfigError, match="10 rows of routes without a start, for 5 new tokens"):
        merge.add(rows(0, 10, turn=1), start_row=None, tokens=11, last_row=False, versions=4)
    assert merge.rows == 6
    merge.add(rows(0, 10, turn=1), start_row=0, tokens=11, last_row=False, versions=np.arange(10) // 6 + 3)
    merged = merge.merged(10)
    assert len(merged.ids_NLK) == 10
    assert (merged.ids_NLK[:6] == rows(0, 6)).all()
    assert (merged.ids_NLK[6:] == rows(6, 10, turn=1)).all()
    assert merged.versions_N.tolist() == [3] * 6 + [4] * 4


def test_new_rows_alone_need_no_start_and_must_be_all_of_them() -> None:
    merge = RouteMerge()
    merge.add(rows(0, 6), start_row=None, tokens=7, last_row=False, versions=3)
    with pytest.raises(ConfigError, match="3 rows of routes, expected 4"):
        merge.add(rows(7, 10), start_row=None, tokens=11, last_row=False, versions=4)
    merge.add(rows(6, 10), start_row=None, tokens=11, last_row=False, versions=4)
    assert (merge.merged(10).ids_NLK == rows(0, 10)).all()


def test_rows_behind_a_gap_leave_the_gap_open() -> None:
    merge = RouteMerge()
    merge.add(rows(0, 3), start_row=0, tokens=4, last_row=False, versions=3)
    merge.add(rows(6, 10), start_row=6, tokens=11, last_row=False, versions=4)
    merged = merge.merged(11)
    assert merged.recorded_N.tolist() == [True] * 3 + [False] * 3 + [True] * 4 + [False]
    assert merged.versions_N.tolist() == [3] * 3 + [-1] * 3 + [4] * 4 + [-1]


def test_shapes_and_starts_that_cannot_be() -> None:
    merge = RouteMerge()
    with pytest.raises(ConfigError, match="no turn"):
        merge.merged(3)
    with pytest.raises(ConfigError, match="shape"):
        merge.add(rows(0, 6)[0], start_row=0, tokens=7, last_row=False, versions=1)
    with pytest.raises(ConfigError, match="rows of routes"):
        merge.add(rows(0, 7), start_row=-1, tokens=7, last_row=False, versions=1)
    merge.add(rows(0, 6), start_row=0, tokens=7, last_row=False, versions=1)
    with pytest.raises(ConfigError, match="after"):
        merge.add(np.zeros((9, 2, 2), np.int64), start_row=0, tokens=10, last_row=False, versions=1)


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.integers(0, 20)), min_size=1, max_size=6))
def test_however_turns_overlap_each_row_is_the_first_that_was_returned(
    turns: list[tuple[int, bool, int]],
) -> None:
    merge, tokens = RouteMerge(), 0
    wanted: dict[int, int] = {}
    for turn, (new, last_row, start) in enumerate(turns):
        tokens += new + 1
        end = tokens if last_row else tokens - 1
        start = min(start, end)
        merge.add(rows(start, end, turn), start_row=start, tokens=tokens, last_row=last_row, versions=turn)
        for row in range(start, end):
            wanted.setdefault(row, turn)
    if merge.empty:
        return
    merged = merge.merged(tokens)
    assert {int(t): int(merged.versions_N[t]) for t in np.flatnonzero(merged.recorded_N)} == wanted
    for row, turn in wanted.items():
        assert (merged.ids_NLK[row] == rows(row, row + 1, turn)).all()
