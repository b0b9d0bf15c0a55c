"""Pseudonyms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwire.schemas.errors import Refused
from rollwire.schemas.pseudonyms import is_pseudonym, pseudonym_of

SECRET = bytes(32)
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


def test_a_golden_pseudonym() -> None:
    """Pseudonyms stand in the log for ever: the function never changes."""
    assert pseudonym_of(SECRET, "acme", "ada@example.org") == "2211dd7c97cd3c6c80f59fd8bed36207"


@given(_TEXT, _TEXT, _TEXT, _TEXT)
def test_people_and_tenants_are_told_apart(tenant: str, subject: str, tenant2: str, subject2: str) -> None:
    first, second = pseudonym_of(SECRET, tenant, subject), pseudonym_of(SECRET, tenant2, subject2)
    assert is_pseudonym(first)
    assert (first == second) == ((tenant, subject) == (tenant2, subject2))
    assert pseudonym_of(b"other" * 8, tenant, subject) != first


def test_nothing_is_normalised_and_boundaries_count() -> None:
    made = {
        pseudonym_of(SECRET, *who)
        for who in (
            ("ab", "c"),
            ("a", "bc"),
            ("", "abc"),
            ("ab", "C"),
            ("ab", "c "),
            ("ab", "é"),
            ("ab", "e\u0301"),
        )
    }
    assert len(made) == 7


@pytest.mark.parametrize("subject", ["", "\ud83d"])
def test_what_is_no_subject_is_refused(subject: str) -> None:
    with pytest.raises(Refused, match="id_invalid"):
        pseudonym_of(SECRET, "t", subject)


@pytest.mark.parametrize("text", ["", "a" * 31, "a" * 33, "A" * 32, "g" * 32, "a" * 32 + "\n"])
def test_what_is_no_pseudonym(text: str) -> None:
    assert not is_pseudonym(text)
