"""Slots: submitted = accepted + filtered + dropped + pending, whatever comes in whatever order."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwire.producers.slots import SlotCounts, Slots
from rollwire.schemas.errors import ConfigError
from rollwire.schemas.records import Cut, Fate, GroupFate


def fate(group_id: str, kind: Fate) -> GroupFate:
    return GroupFate(
        group_id=group_id,
        fate=kind,
        reason="trained",
        detail="",
        decided_by="pack",
        fleet="fleet",
        replica="fleet-0",
        members=(),
        reward_mean=None,
        group_size=8,
        for_version=None,
        oldest_version=None,
        cut=Cut(inputs=(), clock_us=0),
    )


@given(
    st.integers(1, 5),
    st.lists(
        st.tuples(
            st.sampled_from(["open", "fate", "lost"]), st.integers(0, 7), st.sampled_from(get_args(Fate))
        )
    ),
)
def test_the_ledger_balances_at_every_moment(capacity: int, moves: list[tuple[str, int, Fate]]) -> None:
    slots = Slots(capacity)
    opened: set[str] = set()
    submitted = closed = 0
    for move, number, kind in moves:
        group_id = f"g{number}"
        if move == "open":
            if slots.free and group_id not in opened:
                slots.open(group_id)
                opened.add(group_id)
                submitted += 1
        elif move == "fate":
            assert slots.give_back(fate(group_id, kind)) == (group_id in opened)
            closed += group_id in opened
            opened.discard(group_id)
        else:
            slots.lost(group_id, group_size=1)
            closed += group_id in opened
            opened.discard(group_id)
        counts = slots.counts
        assert counts.balanced
        assert counts.submitted == submitted
        assert counts.pending == len(opened) == capacity - slots.free
        assert counts.accepted + counts.filtered + counts.dropped == closed


def test_every_fate_gives_the_slot_back() -> None:
    slots = Slots(4)
    for kind in get_args(Fate):
        slots.open(f"g-{kind}")
    assert slots.free == 0
    for kind in get_args(Fate):
        assert slots.give_back(fate(f"g-{kind}", kind))
        assert not slots.give_back(fate(f"g-{kind}", kind))
    assert slots.counts == SlotCounts(submitted=4, accepted=1, filtered=1, dropped=2, pending=0)


def test_a_group_is_lost_only_with_its_last_rollout() -> None:
    slots = Slots(1)
    slots.open("g")
    slots.lost("g", group_size=2)
    assert slots.free == 0
    slots.lost("g", group_size=2)
    assert slots.free == 1
    assert slots.counts == SlotCounts(submitted=1, accepted=0, filtered=0, dropped=1, pending=0)


def test_no_slot_no_group() -> None:
    slots = Slots(1)
    slots.open("g")
    with pytest.raises(ConfigError, match="no slot is free"):
        slots.open("h")


def test_a_group_opens_once() -> None:
    slots = Slots(2)
    slots.open("g")
    with pytest.raises(ConfigError, match="open already"):
        slots.open("g")
