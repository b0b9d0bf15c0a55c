"""docs/cases.md is what the tests' names say now, and no case of this path is without a test."""

from __future__ import annotations

import re
from pathlib import Path

from rollwire.ops.docs_cases import CASES, ROOT, TARGET, cases_page, find_case_tests

TESTS = find_case_tests(ROOT / "tests")


def test_the_committed_page_is_current() -> None:
    assert TARGET.read_text("utf-8") == cases_page(TESTS), "run `python -P -m rollwire.ops.docs_cases`"


def test_every_case_has_a_test_and_every_test_a_case() -> None:
    known = {case_id for cases in CASES.values() for case_id in cases}
    assert known - TESTS.keys() == set()
    assert TESTS.keys() - known == set()


def test_ids_are_found_in_names(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_a.py").write_text(
        "def test_c40_a_hole(): ...\n"
        "class TestB:\n"
        "    async def test_c56_c59_both(self): ...\n"
        "def test_abc12_is_no_id(): ...\n"
        "def helper_c41_is_no_test(): ...\n"
    )
    assert find_case_tests(folder) == {
        "C40": ["tests/test_a.py::test_c40_a_hole"],
        "C56": ["tests/test_a.py::test_c56_c59_both"],
        "C59": ["tests/test_a.py::test_c56_c59_both"],
    }


def test_every_case_says_what_must_hold_and_where_it_was_reported() -> None:
    for cases in CASES.values():
        for case_id, case in cases.items():
            assert re.fullmatch(r"C\d\d", case_id)
            # An issue, a dated report, or an advisory.
            assert "#" in case.source or re.search(r"\d{4}-\d\d-\d\d|GHSA(-[0-9a-z]{4}){3}", case.source)
            assert case.title
            assert case.expected
