"""The targets that a command line can name, and a probe that is a command."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Literal, NamedTuple

from rollwire.consumers.weights.probe import Probe
from rollwire.consumers.weights.targets.folder import CURRENT, FolderTarget
from rollwire.consumers.weights.targets.numpy_state import NumpyTarget
from rollwire.consumers.weights.targets.target import Target
from rollwire.consumers.weights.targets.vllm import Kv
from rollwire.ops.engines import engine_target
from rollwire.producers.engine_http import EngineConfig
from rollwire.schemas.errors import ConfigError, ProbeFailed
from rollwire.schemas.records import WeightVersion

TargetName = Literal["folder", "numpy", "vllm", "sglang"]


class TargetOptions(NamedTuple):
    name: TargetName
    folder: Path | None
    extra: Path | None  # whose files are put beside each version's weights
    url: str | None
    kv: Kv = "keep"
    fingerprint: bool = False


def open_target(options: TargetOptions) -> Target:
    """Raises `ConfigError` that names the option that is missing or too much."""
    if options.name == "numpy":
        _without(options, "folder", "extra", "url")
        return NumpyTarget()
    if options.folder is None:
        raise ConfigError(f"--target {options.name} needs --folder: where the weights are written")
    if options.name == "folder":
        _without(options, "url")
        return FolderTarget(options.folder, extra=options.extra)
    if options.url is None:
        raise ConfigError(f"--target {options.name} needs --url: the engine's address")
    config = EngineConfig(
        kind=options.name,
        url=options.url,
        root=options.folder,
        first=options.extra,
        proof="fingerprint" if options.fingerprint else "label",
    )
    return engine_target(config, kv=options.kv)


def command_probe(command: str, folder: Path | None, timeout_s: float) -> Probe:
    """Runs `command` after each swap, with ROLLWIRE_VERSION and, where there is one, ROLLWIRE_FOLDER; exit code 0 is yes.

    Raises `ConfigError` for a line that can't be split into words.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--probe {command!r}: {error}") from error
    if not words:
        raise ConfigError("--probe is empty")

    def probe(event: WeightVersion) -> None:
        given = {"ROLLWIRE_VERSION": str(event.version)}
        if folder is not None:
            given["ROLLWIRE_FOLDER"] = str(folder / CURRENT)
        try:
            done = subprocess.run(
                words,
                env={**os.environ, **given},
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ProbeFailed(f"{words[0]}: {error}") from error
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise ProbeFailed(f"{words[0]} ended with {done.returncode}: {said[-1] if said else 'no word'}")

    return probe


def _without(options: TargetOptions, *names: str) -> None:
    for name in names:
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name} does not go with --target {options.name}")
