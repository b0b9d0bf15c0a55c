"""Which code is running, as events say it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from rollwire.schemas.release import code_version, commit_of


def test_the_code_version_names_the_release_and_is_the_same_all_the_time() -> None:
    assert code_version()[0].isdigit()
    assert code_version() is code_version()


def test_a_folder_that_is_no_working_tree_has_nocommit_of(tmp_path: Path) -> None:
    assert commit_of(tmp_path) is None


def test_a_changed_file_is_told_from_thecommit_of(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "code.py").write_text("1\n")
    git("add", "code.py")
    git("commit", "-q", "-m", "code")
    clean = commit_of(tmp_path)
    (tmp_path / "code.py").write_text("2\n")
    changed = commit_of(tmp_path)
    assert clean is not None
    assert len(clean) == 13
    assert changed == f"{clean}.changed"
