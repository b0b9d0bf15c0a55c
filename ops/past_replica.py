"""A replica that is pinned to the past: one version, rebuilt from what is kept, behind an engine's HTTP calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from rollwire.consumers.audit.rebuild_deltas import DeltaRebuild
from rollwire.consumers.audit.rebuild_past import Past
from rollwire.consumers.audit.rebuild_recipe import recipe_of
from rollwire.consumers.weights.anchor import write_anchor
from rollwire.consumers.weights.export import hf_config
from rollwire.consumers.weights.status import StatusReports
from rollwire.consumers.weights.targets.engine import version_label
from rollwire.kernels.policy import config as policy_config
from rollwire.kernels.tensors import State
from rollwire.ops.stub_engine.config import StubEngineConfig
from rollwire.ops.stub_engine.core import StubCore
from rollwire.ops.stub_engine.http import Refusal
from rollwire.ops.stub_engine.weights import checksums
from rollwire.schemas.errors import DigestMismatch, ObjectMissing, WeightError
from rollwire.schemas.records import WeightVersion
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.store import ObjectStore

FLEET: Final = "serve-at"
_FORBIDDEN: Final = 403


class PastVersion(NamedTuple):
    event: WeightVersion
    state: State


class PinnedCore(StubCore):
    """Serves what it was started with. A call that would change the weights, or what they are called, is refused."""

    def load(self, folder: Path) -> NoReturn:
        self._refuse()

    def set_label(self, label: str) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise Refusal(_FORBIDDEN, f"this replica is pinned to version {self.config.weight_version}")


def past_version(store: ObjectStore, past: Past, version: int) -> PastVersion:
    """Rebuilt and verified. Raises `WeightError` for a version that was never published, `ObjectMissing` where nothing leads
    to it any more."""
    if version not in past.versions:
        raise WeightError(
            f"version {version} was never published in lineage {past.lineage}; known are {min(past.versions)} to {past.newest}"
        )
    with closing(DeltaRebuild(store, past)) as deltas:
        (made,) = deltas.versions([version])
        state = deltas.state
    if made.digest is None or state is None:
        raise ObjectMissing("; ".join(f"{finding.where}: {finding.detail}" for finding in made.findings))
    return PastVersion(made.event, state)


def write_folder(folder: Path, store: ObjectStore, past: Past, version: PastVersion) -> None:
    """What an engine loads: safetensors and config.json, the latter from the nearest snapshot or from a step's settings."""
    number = version.event.version
    said = hf_config(store, list(past.versions.values()), number)
    if said is None:
        steps = [past.steps[v] for v in sorted(past.steps) if v <= max(number, 1)]
        policy = recipe_of(steps[-1].settings).policy if steps else None
        said = None if policy is None else policy_config.hf_config(policy)
    if said is None:
        raise WeightError(
            f"nothing says the shape of version {number} of {past.model}: no snapshot of it has a config.json"
        )
    for file in write_anchor(version.state, shard_bytes=5 << 30, hf_config=said):
        (folder / file.file).write_bytes(file.data)


@contextmanager
def pinned(config: StubEngineConfig, version: PastVersion) -> Iterator[PinnedCore]:
    """The engine with the version loaded. Raises `DigestMismatch` where the folder holds other bits."""
    core = PinnedCore(config)
    try:
        if core.checksums() != checksums(version.state):
            raise DigestMismatch(f"{config.model_path} does not hold version {version.event.version}")
        yield core
    finally:
        core.close()


@contextmanager
def reporting(log: Log, event: WeightVersion, *, replica: str) -> Iterator[Callable[[], None]]:
    """What is yielded says in `fleet-status` that the version is served, as any replica does; at the end that it is no more.

    Raises `Refused` for a name that no event may carry.
    """
    reports = StatusReports(log, fleet=FLEET, replica=replica, clock=SystemClock(), target="stub")
    said = False

    def serving() -> None:
        nonlocal said
        said = True
        reports.add("swapped", event, event)
        reports.flush()

    try:
        yield serving
    finally:
        if said:
            reports.add("stopped", event, event)
            reports.flush()
        reports.close()


def config_of(
    folder: Path, version: PastVersion, kind: str, *, max_running: int, api_key: str | None
) -> StubEngineConfig:
    return StubEngineConfig.model_validate(
        {
            "kind": kind,
            "model_path": folder,
            "weight_version": version_label(version.event.version),
            "max_running": max_running,
            "api_key": api_key,
        }
    )
