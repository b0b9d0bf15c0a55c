"""The settings of one run: who it is, and the configuration of every process that takes part in it.

A run is a lineage of weight versions under one topic prefix. Its settings are fixed when it begins and stand in its
folder as `run.json`; every process of the run reads them from there, so that all of them agree.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rollwire.consumers.evaluator import EvaluatorConfig
from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.consumers.weights.follow import FollowConfig
from rollwire.consumers.weights.publisher import PublisherConfig
from rollwire.kernels.policy.config import PolicyConfig
from rollwire.ops.config_errors import config_error
from rollwire.ops.demo.feedback.preference import PeopleConfig
from rollwire.producers.environments.known import make_environment
from rollwire.producers.fleet import FleetConfig
from rollwire.producers.gateway.config import GatewayConfig
from rollwire.producers.serving.config import ServingConfig
from rollwire.producers.verifier.verifier import VerifierConfig
from rollwire.schemas.errors import ConfigError, EnvironmentMissing
from rollwire.streams.archive.run_archive import ArchiveConfig
from rollwire.streams.assemble_config import AssembleConfig, ProductionConfig
from rollwire.streams.attribution.config import AttributionConfig
from rollwire.streams.drive import RuntimeConfig
from rollwire.streams.pack import PackConfig

RUN_FILE = "run.json"


class WarmStartConfig(BaseModel):
    """The supervised phase before RL: the policy learns the form of an answer from demonstrations."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    demonstrations: int = Field(40_000, ge=1, description="demonstrations drawn from the training tasks")
    steps: int = Field(300, ge=1, description="optimiser steps")
    batch_size: int = Field(128, ge=1, description="demonstrations a step")
    learning_rate: float = Field(3e-3, gt=0)


class RunSettings(BaseModel):
    """Everything that the processes of one run must agree on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field("policy", description="name of the model in events and object keys")
    prefix: str = Field("rollwire.", description="prefix of the run's topics and transactional ids")
    bucket: str | None = Field(
        None, description="bucket of anchors, deltas and checkpoints; none: the stack's"
    )
    schema_registry_url: str | None = Field(
        None,
        description="a registry that speaks Confluent's API: values are written in its wire format; none: single-object encoding",
    )
    lineage: str = Field(default_factory=lambda: str(uuid.uuid4()), description="UUID of this training run")
    seed: int = Field(0, ge=0, description="of the initial weights, the tasks and the samples")
    environment: str = Field("countdown", description="name of the environment")
    steps: int = Field(250, ge=1, description="optimiser steps to take in all")
    policy: PolicyConfig = PolicyConfig()
    warm_start: WarmStartConfig = WarmStartConfig()  # type: ignore[call-arg,unused-ignore]
    fleet: FleetConfig = FleetConfig()
    follow: FollowConfig = Field(
        FollowConfig(),
        description="which version fleets sample with: the newest, a fixed one, or a channel's",
    )
    verifier: VerifierConfig = VerifierConfig()
    assemble: AssembleConfig = AssembleConfig()
    production: ProductionConfig = Field(
        default=ProductionConfig(), description="how answers of live traffic are joined with their rewards"
    )
    pack: PackConfig = PackConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    trainer: TrainerConfig = TrainerConfig()
    publisher: PublisherConfig = PublisherConfig()
    evaluator: EvaluatorConfig = EvaluatorConfig()
    archive: ArchiveConfig = Field(
        default=ArchiveConfig(), description="how often the archiver seals, and how long it gathers"
    )
    gateway: GatewayConfig = GatewayConfig()  # type: ignore[call-arg,unused-ignore]
    attribution: AttributionConfig = Field(
        default=AttributionConfig(),
        description="how feedback becomes rewards; its rules are the gateway's unless named, broker and prefix the run's",
    )
    serving: ServingConfig = ServingConfig()
    people: PeopleConfig = Field(default=PeopleConfig(), description="the simulated people of a demo")
    monitor_port: int = Field(0, ge=0, le=65_535, description="port of the monitor's page; 0 = a free one")

    @property
    def live(self) -> bool:
        """Whether the run trains on live traffic."""
        return self.pack.live_groups > 0

    @model_validator(mode="after")
    def _agreed(self) -> RunSettings:
        if self.pack.ranks != self.trainer.ranks:
            raise ValueError(
                f"pack.ranks is {self.pack.ranks} and trainer.ranks is {self.trainer.ranks}: set both to the same number"
            )
        if self.pack.context_parallel > 1:
            raise ValueError(
                f"pack.context_parallel is {self.pack.context_parallel}, but the built-in trainer splits no sequence "
                "over devices: set it to 1"
            )
        if self.fleet.replica == self.evaluator.replica:
            raise ValueError(
                f"fleet.replica and evaluator.replica are both {self.fleet.replica!r}: name them apart"
            )
        if self.serving.replica in (self.fleet.replica, self.evaluator.replica):
            raise ValueError(
                f"serving.replica is {self.serving.replica!r}, as the fleet's or the evaluator's: name them apart"
            )
        # In a mix as many as in a plan without answers: where live traffic ends, a plan of the others alone is made.
        sampled = 0 if self.pack.live_groups == self.pack.groups_per_step else self.pack.groups_per_step
        if self.fleet.max_open_groups < sampled:
            raise ValueError(
                f"fleet.max_open_groups is {self.fleet.max_open_groups}, below the {sampled} groups of a step "
                "(pack.groups_per_step) that it samples: no plan would ever be full"
            )
        try:
            environment = make_environment(self.environment)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        demanded = {"policy.vocab_size": environment.vocab_size, "policy.eos_token_id": environment.end_id}
        given = {
            "policy.vocab_size": self.policy.vocab_size,
            "policy.eos_token_id": self.policy.eos_token_id,
        }
        for name, value in demanded.items():
            if given[name] != value:
                raise ValueError(f"{name} is {given[name]}, the environment {self.environment!r} has {value}")
        return self


def build_settings(values: Mapping[str, Any], *, where: str) -> RunSettings:
    """Validated settings. Raises `ConfigError` naming each wrong key and the nearest right one."""
    try:
        return RunSettings.model_validate(dict(values))
    except ValidationError as error:
        raise config_error(error, RunSettings, where=where) from None


def save_settings(folder: Path, settings: RunSettings) -> None:
    """Whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{RUN_FILE}.partial"
    partial.write_text(settings.model_dump_json(indent=2) + "\n")
    partial.replace(folder / RUN_FILE)


def load_settings(folder: Path) -> RunSettings:
    """Raises `EnvironmentMissing` where there is no run, `ConfigError` where its file is wrong."""
    path = folder / RUN_FILE
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise EnvironmentMissing(f"there is no run in {folder}: `rollwire demo` begins one") from None
    try:
        return RunSettings.model_validate_json(text)
    except ValidationError as error:
        raise config_error(error, RunSettings, where=str(path)) from None


def with_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`values` with `dotted.key=value` overrides laid over it; values are read as JSON where they are JSON."""
    merged: dict[str, Any] = json.loads(json.dumps(values))
    for override in overrides:
        key, equals, raw = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"{override!r} is not of the form key=value, as in trainer.learning_rate=1e-4")
        try:
            value: Any = json.loads(raw)
        except ValueError:
            value = raw
        *parents, leaf = key.split(".")
        node = merged
        for parent in parents:
            child = node.setdefault(parent, {})
            if not isinstance(child, dict):
                raise ConfigError(f"{override!r}: {parent} is a value, not a section")
            node = child
        node[leaf] = value
    return merged


def flattened(settings: RunSettings) -> Iterator[tuple[str, str]]:
    """Every setting as (dotted name, value as JSON), by name."""

    def walk(name: str, value: Any) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict) and value:
            for key in sorted(value):
                yield from walk(f"{name}.{key}" if name else key, value[key])
        else:
            yield name, json.dumps(value)

    yield from walk("", settings.model_dump(mode="json"))
