"""The layout of the house: links, packages, import contracts and checks that are able to fail."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollwire.ops.typecheck import ROOMS, expected_files

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "rollwire"
BIN = Path(sys.executable).parent


def python_files() -> Iterator[Path]:
    for folder in (*ROOMS, "tests"):
        yield from sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_is_a_relative_link(room: str) -> None:
    link = PACKAGE / room
    assert link.is_symlink()
    assert os.readlink(link) == f"../../{room}"
    assert link.resolve() == ROOT / room


def test_the_package_holds_the_rooms_and_nothing_else() -> None:
    names = {path.name for path in PACKAGE.iterdir()} - {"__pycache__"}
    assert names == {"__init__.py", "py.typed", *ROOMS}


def test_every_package_folder_says_what_it_is() -> None:
    for room in ROOMS:
        for folder in {path.parent for path in (ROOT / room).rglob("*.py")}:
            init = folder / "__init__.py"
            assert init.exists(), f"{folder.relative_to(ROOT)} has no __init__.py"
            assert ast.get_docstring(ast.parse(init.read_text())), f"{init.relative_to(ROOT)} says nothing"


def test_imports_are_absolute_and_by_the_namespace() -> None:
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                assert (node.module or "").split(".")[0] not in ROOMS, f"{path}: imports {node.module}"
            elif isinstance(node, ast.Import):
                for name in node.names:
                    assert name.name.split(".")[0] not in ROOMS, f"{path}: imports {name.name}"


def test_tests_are_no_packages_and_have_names_of_their_own() -> None:
    tests = list((ROOT / "tests").rglob("*.py"))
    assert not [path for path in tests if path.name == "__init__.py"]


def test_files_stay_short() -> None:
    for path in python_files():
        lines = len(path.read_text().splitlines())
        assert lines <= 800, f"{path.relative_to(ROOT)} has {lines} lines"


def committed_texts() -> Iterator[tuple[str, str]]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_symlink() or not path.is_file():
            continue
        try:
            yield name, path.read_text()
        except UnicodeDecodeError:
            continue


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_committed_files_name_no_path_of_one_machine() -> None:
    # Built from parts, so that this file does not hold what it looks for.
    local = re.compile("|".join(["/" + "root/", "/" + r"home/\w+/", "/" + "Users/", "/" + "work/"]))
    for name, text in committed_texts():
        found = local.search(text)
        assert found is None, f"{name} holds the path {found[0] if found else ''}"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_constraints_hold_versions_only() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line), line


def test_every_direct_dependency_is_constrained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["train"], *extras["lake"], *extras["dev"]]
    names = {re.split(r"[\[<>=!~ ;]", requirement)[0].lower() for requirement in wanted}
    pinned = {
        line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    assert pinned == names


def test_pyright_is_told_of_every_room() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    included = set(tools["pyright"]["include"])
    assert included == {*(f"src/rollwire/{room}" for room in ROOMS), "src/rollwire/__init__.py", "tests"}
    assert expected_files(ROOT) == 1 + len(list(python_files()))


BREACHES = {
    "rooms": ("streams/breach.py", "from rollwire.consumers import breach_target\n"),
    "seams-only": ("producers/breach.py", "import rollwire.streams.breach_target\n"),
    "core-without-io": ("kernels/breach.py", "import redis\n"),
    "clients-in-the-seams": ("consumers/breach.py", "import confluent_kafka\n"),
    "torch-where-it-is-needed": ("ops/breach.py", "import torch\n"),
    "slim-without-torch": (
        "consumers/weights/breach.py",
        "import rollwire.consumers.trainer.breach_target\n",
    ),
}


def test_each_import_contract_reports_a_planted_breach(tmp_path: Path) -> None:
    """A contract that cannot fail proves nothing: a copy of the tree with one breach for each breaks all of them."""
    for room in ROOMS:
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(PACKAGE, tmp_path / "src" / "rollwire", symlinks=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    names = {contract["id"]: contract["name"] for contract in contracts}
    assert set(names) == set(BREACHES), "each contract needs a planted breach"
    for room in ("consumers", "streams"):
        (tmp_path / room / "breach_target.py").write_text("")
    (tmp_path / "consumers" / "trainer" / "breach_target.py").write_text("import torch\n")
    for file, text in BREACHES.values():
        (tmp_path / file).write_text(text)
    linted = subprocess.run(
        [BIN / "lint-imports", "--no-cache", "--no-logo"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src"), "COLUMNS": "500"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert linted.returncode != 0
    for contract, name in names.items():
        assert f"{name} BROKEN" in linted.stdout, f"{contract} did not see its breach:\n{linted.stdout}"


def test_the_script_of_ci_is_executable_and_runs_the_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()


def test_make_without_a_target_lists_the_targets() -> None:
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    for target in ("setup", "demo", "test", "check", "clean"):
        assert re.search(rf"^  make {target}\s+\S", shown, flags=re.MULTILINE)
