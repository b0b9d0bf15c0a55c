"""Which versions lead to which, over reverts of reverts."""

from __future__ import annotations

from functools import reduce

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rollwire.schemas.golden import load_examples
from rollwire.schemas.records import WeightVersion
from rollwire.streams.reverts import NO_REVERTS, Revert, Reverts


def version_event(version: int, to: int | None = None) -> WeightVersion:
    made = next(e.event for e in load_examples("weight-versions") if e.name == "delta")
    assert isinstance(made, WeightVersion)
    kind = "delta" if to is None else "revert"
    return msgspec.structs.replace(made, version=version, kind=kind, reverts_to=to)


# 0 1 2 3 4 5 | 6 = 2, 7 8 | 9 = 4, 10
TWO = Reverts((Revert(6, 2), Revert(9, 4)))


def test_what_was_given_up_does_not_lead_on() -> None:
    assert [v for v in range(6) if TWO.leads(v, 5)] == [0, 1, 2, 3, 4, 5]
    assert [v for v in range(9) if TWO.leads(v, 8)] == [0, 1, 2, 6, 7, 8]


def test_a_revert_to_a_version_that_was_given_up_takes_its_line_up_again() -> None:
    assert [v for v in range(11) if TWO.leads(v, 10)] == [0, 1, 2, 3, 4, 9, 10]


def test_no_version_leads_back() -> None:
    assert not TWO.leads(7, 6)
    assert not NO_REVERTS.leads(1, 0)


def test_a_plan_says_which_revert_it_knew_of() -> None:
    assert [TWO.newest_at(v) for v in (0, 5, 6, 8, 9, 10)] == [None, None, 6, 6, 9, 9]
    assert TWO.newest == 9
    assert NO_REVERTS.newest is None


def test_plans_for_the_step_of_a_revert_and_later_ones_are_passed_over() -> None:
    assert [step for step in range(1, 9) if TWO.passes_over(step, None)] == [6, 7, 8]
    assert [step for step in range(7, 12) if TWO.passes_over(step, 6)] == [9, 10, 11]
    assert not any(TWO.passes_over(step, 9) for step in range(10, 15))


def test_repeats_and_ordinary_versions_are_no_news() -> None:
    events = [version_event(n) for n in range(1, 6)] + [version_event(6, 2)]
    found = reduce(Reverts.add, [*events, *events], NO_REVERTS)
    assert found == Reverts((Revert(6, 2),))
    assert found.add(version_event(6, 2)) is found


@given(st.lists(st.one_of(st.none(), st.integers(0, 30)), max_size=30))
def test_it_leads_wherever_walking_back_step_by_step_comes_by(drawn: list[int | None]) -> None:
    """`drawn[i]` says how version i + 1 was made: by a step, or as a revert to an older version."""
    made_from = {0: -1}
    reverts = NO_REVERTS
    for number, choice in enumerate(drawn, 1):
        to = None if choice is None or number < 2 else choice % (number - 1)
        made_from[number] = number - 1 if to is None else to
        reverts = reverts.add(version_event(number, to))
    for last in made_from:
        line: set[int] = set()
        at = last
        while at >= 0:
            line.add(at)
            at = made_from[at]
        assert {v for v in made_from if reverts.leads(v, last)} == line
