"""`rollwire schemas diff` against a release of a real git repository, and this checkout against its own last release."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from rollwire.ops.cli import run
from rollwire.ops.schema_tree import CHECKOUT, newest_release, tree_of_folder, tree_of_ref
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.diff import compare, read_tree
from rollwire.schemas.errors import ConfigError


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """A repository with today's schemas, released as v1.0.0."""
    for room in ("topics", "avro"):
        shutil.copytree(CHECKOUT / "schemas" / room, tmp_path / "schemas" / room)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "schemas")
    git(tmp_path, "commit", "-q", "-m", "all")
    git(tmp_path, "tag", "v1.0.0")
    return tmp_path


def add_field(checkout: Path, file: str, into: str, **field: object) -> None:
    schema = json.loads((checkout / "schemas" / "avro" / file).read_text())
    schema["fields"].append({"name": "room", "type": "string", **field})
    (checkout / "schemas" / "avro" / into).write_text(json.dumps(schema))


def test_both_ways_to_read_a_tree_give_the_catalogue(released: Path) -> None:
    assert newest_release(released) == "v1.0.0"
    tree = tree_of_folder(CHECKOUT)
    assert tree_of_ref(released, "v1.0.0") == tree
    read = read_tree(tree)
    assert set(read) == set(TOPICS)
    assert all(read[name].consumers == spec.consumers for name, spec in TOPICS.items())


def test_nothing_changed_ends_with_0(released: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schemas", "diff", "--checkout", str(released)]) == 0
    assert capsys.readouterr().out == "0 changes since v1.0.0, 0 of them break somebody\n"


def test_a_breaking_change_ends_with_1_and_names_who_breaks(
    released: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_field(released, "rewards.v1.avsc", "rewards.v1.avsc")
    git(released, "commit", "-q", "-a", "-m", "committed since: the release counts")
    assert run(["schemas", "diff", "--checkout", str(released)]) == 1
    out = capsys.readouterr().out
    assert "BREAKS rewards: v1 was edited after its release (+room)" in out
    for who in (*TOPICS["rewards"].producers, *TOPICS["rewards"].consumers):
        assert who in out
    assert run(["schemas", "diff", "HEAD", "--checkout", str(released)]) == 0


def test_a_compatible_version_ends_with_0(released: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_field(released, "rewards.v1.avsc", "rewards.v2.avsc", default="")
    topic = released / "schemas" / "topics" / "rewards.toml"
    second = '\n[[schemas]]\nversion = 2\nfile = "rewards.v2.avsc"\ncompatibility = "FULL"\nexamples = "rewards/v2"\n'
    topic.write_text(topic.read_text() + second)
    assert run(["schemas", "diff", "--checkout", str(released)]) == 0
    assert "fine   rewards: v2 is new (+room)" in capsys.readouterr().out


def test_what_is_no_ref_or_no_checkout_ends_with_2(
    released: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert run(["schemas", "diff", "v9", "--checkout", str(released)]) == 2
    assert run(["schemas", "diff", "--checkout", str(tmp_path_factory.mktemp("empty"))]) == 2
    with pytest.raises(ConfigError, match="no git ref"):
        tree_of_ref(released, "--output=x")


@pytest.mark.skipif(not (CHECKOUT / ".git").exists(), reason="not a git checkout")
def test_nobody_is_broken_since_the_last_release() -> None:
    release = newest_release(CHECKOUT)
    if release is None:
        pytest.skip("nothing is released yet: every schema may still be edited in place")
    found = compare(read_tree(tree_of_ref(CHECKOUT, release)), read_tree(tree_of_folder(CHECKOUT)))
    assert [change for change in found if change.breaks] == []
