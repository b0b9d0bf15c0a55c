"""Ids carry the group's opening time and the rollout's group."""

from __future__ import annotations

import uuid

import pytest
import uuid_utils
from hypothesis import given
from hypothesis import strategies as st

from rollwire.schemas.errors import Refused
from rollwire.schemas.ids import is_group_id, new_group_id, opened_us, parse_rollout_id, rollout_id


@given(ms=st.integers(0, 2**48 - 1), below_ms=st.integers(0, 999), bits=st.integers(0, 2**80))
def test_a_group_id_is_a_uuid7_that_carries_its_time(ms: int, below_ms: int, bits: int) -> None:
    group = new_group_id(ms * 1_000 + below_ms, bits)
    parsed = uuid.UUID(group)
    assert str(parsed) == group
    assert parsed.version == 7
    assert parsed.variant == uuid.RFC_4122
    assert uuid_utils.UUID(group).timestamp == ms
    assert opened_us(group) == ms * 1_000
    assert is_group_id(group)


@given(a=st.integers(0, 2**74 - 1), b=st.integers(0, 2**74 - 1))
def test_all_74_random_bits_tell_ids_apart(a: int, b: int) -> None:
    assert (new_group_id(0, a) == new_group_id(0, b)) == (a == b)


def test_ids_of_later_groups_sort_behind() -> None:
    assert new_group_id(1_000, 2**74 - 1) < new_group_id(2_000, 0)


@pytest.mark.parametrize("time_us", [-1, 2**48 * 1_000])
def test_a_time_outside_48_bits_is_an_error(time_us: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        new_group_id(time_us, 0)


@given(index=st.integers(0, 999_999))
def test_a_rollout_id_names_its_group_and_index(index: int) -> None:
    group = new_group_id(1_767_225_600_000_000, 7)
    assert parse_rollout_id(rollout_id(group, index)) == (group, index)


@pytest.mark.parametrize("index", [-1, 1_000_000])
def test_an_index_out_of_range_is_an_error(index: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        rollout_id(new_group_id(0, 0), index)


GROUP = new_group_id(1_767_225_600_000_000, 7)
UUID4 = "43412ba4-0e1c-4a95-87f1-66255564ba67"


@pytest.mark.parametrize(
    "text",
    [
        "",
        GROUP,
        f"{GROUP}.",
        f"{GROUP}.-1",
        f"{GROUP}.01",
        f"{GROUP}.1000000",
        f"{GROUP}.1\n",
        f"{GROUP}.\u0661",  # a digit, but not one of ours
        f"{GROUP.upper()}.1",
        f"{UUID4}.1",
        f" {GROUP}.1",
    ],
)
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(Refused) as caught:
        parse_rollout_id(text)
    assert caught.value.reason == "id_invalid"


@pytest.mark.parametrize("text", ["", "x", UUID4, GROUP.upper(), GROUP.replace("-", ""), f"{GROUP}\n"])
def test_a_time_is_read_from_a_uuid7_only(text: str) -> None:
    assert not is_group_id(text)
    with pytest.raises(Refused) as caught:
        opened_us(text)
    assert caught.value.reason == "id_invalid"
