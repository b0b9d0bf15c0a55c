"""The core, the SDK and the subscriber run in an environment without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rollwire.ops.typecheck import ROOMS

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]

# What a product engineer, an inference engineer and an auditor import.
WITHOUT_TORCH = (
    "rollwire.schemas.codec",
    "rollwire.kernels.delta",
    "rollwire.kernels.packing",
    "rollwire.kernels.advantages",
    "rollwire.streams.run_assemble",
    "rollwire.streams.run_pack",
    "rollwire.streams.seams.log_kafka",
    "rollwire.streams.seams.store_s3",
    "rollwire.streams.seams.registry_confluent",
    "rollwire.schemas.diff",
    "rollwire.ops.gateway",
    "rollwire.producers.feedback",
    "rollwire.producers.feedback.async_client",
    "rollwire.producers.feedback.log_feedback",
    "rollwire.producers.fleet",
    "rollwire.producers.environments.countdown",
    "rollwire.producers.verifier.verifier",
    "rollwire.consumers.weights.subscriber",
    "rollwire.consumers.weights.follower",
    "rollwire.consumers.weights.targets.folder",
    "rollwire.consumers.weights.targets.numpy_state",
    "rollwire.consumers.weights.targets.torch_module",
    "rollwire.ops.commands.fleet",
    "rollwire.consumers.weights.publisher",
    "rollwire.consumers.weights.reader",
    "rollwire.consumers.ledger",
    "rollwire.consumers.trainer.arithmetic",
    "rollwire.ops.cli",
    "rollwire.ops.commands.schemas",
    "rollwire.ops.asyncapi.parser",
    "rollwire.ops.stack",
)


def _uv() -> str:
    """uv from the PATH, or the one that the set-up put beside this checkout."""
    own = ROOT / ".rollwire" / "tools" / "bin" / "uv"
    found = shutil.which("uv") or (str(own) if own.exists() else None)
    if found is None:
        pytest.fail("uv is missing: run `make setup`")
    return found


def _run(*command: str | Path, cwd: Path) -> str:
    environment = {
        key: value for key, value in os.environ.items() if key not in {"VIRTUAL_ENV", "PYTHONPATH"}
    }
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**environment, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def slim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a new environment with the package as a wheel and its core dependencies only."""
    folder = tmp_path_factory.mktemp("slim")
    _run(_uv(), "venv", "--quiet", "--python", sys.executable, folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    # Built from a copy: setuptools leaves a `build/` beside what it builds.
    source = folder / "source"
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "src", source / "src", symlinks=True, ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    _run(_uv(), "pip", "install", "--quiet", "--python", python, "-c", constraints, source, cwd=folder)
    return folder


def test_the_environment_has_no_torch(slim: Path) -> None:
    program = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is not None)"
    _run(slim / "venv" / "bin" / "python", "-c", program, cwd=slim)


def test_everything_but_the_policy_imports_without_torch(slim: Path) -> None:
    program = "".join(f"import {module}\n" for module in WITHOUT_TORCH)
    _run(slim / "venv" / "bin" / "python", "-W", "error", "-c", program, cwd=slim)


def test_the_wheel_carries_schemas_topics_the_pom_and_asyncapis_files(slim: Path) -> None:
    program = (
        "from pathlib import Path; import rollwire.ops.stack as s; import rollwire.ops.asyncapi as a;"
        "from rollwire.schemas.catalogue import TOPICS;"
        "assert Path(s.__file__).with_name('pom.xml').exists();"
        "assert Path(a.__file__).with_name('package.json').exists();"
        "assert Path(a.__file__).with_name('validate.cjs').exists();"
        "import rollwire.producers.gateway.browser as b;"
        "assert Path(b.__file__).with_name('feedback.js').exists(); assert Path(b.__file__).with_name('feedback.d.ts').exists();"
        "print(len(TOPICS))"
    )
    topics = int(_run(slim / "venv" / "bin" / "python", "-c", program, cwd=slim))
    assert topics == len(list((ROOT / "schemas" / "topics").glob("*.toml")))


def test_the_command_line_runs_without_torch(slim: Path) -> None:
    assert "Usage: rollwire" in _run(slim / "venv" / "bin" / "rollwire", "--help", cwd=slim)
