"""What a person may ask of a demo, and the settings that follow from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollwire.ops.demo.feedback.recipe import FEEDBACK_STEPS, feedback_recipe, lay_over
from rollwire.ops.settings import RunSettings, build_settings, with_overrides
from rollwire.producers.environments.known import make_environment
from rollwire.producers.fleet import FleetConfig
from rollwire.schemas.errors import ConfigError
from rollwire.streams.pack import PackConfig

DEFAULT_STEPS = 250
GROUPS_PER_STEP = PackConfig().groups_per_step
MAX_OPEN_GROUPS = FleetConfig().max_open_groups
DEFAULT_ENVIRONMENT = "countdown"
# What differs from the defaults, which are countdown's. The calculator is learnt at a lower rate: at twice of it so many groups
# end up all right within the run that few are left to learn from.
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "calculator": {
        "warm_start": {"demonstrations": 20_000},
        "trainer": {"learning_rate": 1e-4},
    },
}


@dataclass(frozen=True, slots=True)
class DemoOptions:
    dir: Path
    steps: int | None = None  # None = the default, or what the run that is continued was set to
    seed: int | None = None  # None = 0
    environment: str | None = None  # None = countdown
    feedback: bool = False  # learn from people's clicks on a live policy
    control: bool = False
    resume: bool = False
    max_lag: int | None = None
    no_ratio: bool = False
    overrides: tuple[str, ...] = ()
    json_file: Path | None = None
    plain: bool = False

    @property
    def kind(self) -> str:
        if self.feedback:
            return "feedbackcontrol" if self.control else "feedback"
        return "control" if self.control else "demo"


def new_settings(options: DemoOptions, name: str) -> RunSettings:
    """Settings of a new run called `name`. Raises `ConfigError` for a setting that does not exist."""
    default_steps = FEEDBACK_STEPS if options.feedback else DEFAULT_STEPS
    steps = default_steps if options.steps is None else options.steps
    seed = 0 if options.seed is None else options.seed
    name_of_environment = DEFAULT_ENVIRONMENT if options.environment is None else options.environment
    environment = make_environment(name_of_environment)
    values: dict[str, Any] = {
        "prefix": f"rollwire.{name}.",
        "seed": seed,
        "steps": steps,
        "fleet": {"seed": seed},
        "environment": name_of_environment,
        "policy": {"vocab_size": environment.vocab_size, "eos_token_id": environment.end_id},
    }
    values |= deepcopy(dict(RECIPES.get(name_of_environment, {})))
    values.setdefault("trainer", {})["seed"] = seed
    if options.feedback:
        lay_over(values, feedback_recipe(seed, name_of_environment))
        values["trainer"]["control"] = options.control
    elif options.control:
        # A policy that unlearns soon has no groups of unequal rewards: without the equal ones (their advantage is 0) the
        # control would sample for ever. Twice the groups a step are about as many as the demo samples a step.
        values["trainer"]["control"] = True
        values["assemble"] = {"equal_rewards": "keep"}
        values["pack"] = {"groups_per_step": 2 * GROUPS_PER_STEP}
        values["fleet"]["max_open_groups"] = 2 * MAX_OPEN_GROUPS
    if options.no_ratio:
        values["trainer"]["use_ratio"] = False
    if options.max_lag is not None:
        values.setdefault("pack", {})["max_lag_versions"] = options.max_lag
    settings = build_settings(with_overrides(values, options.overrides), where="the demo's options")
    return with_final(settings, settings.steps)


def with_final(settings: RunSettings, steps: int) -> RunSettings:
    """The same run, ending after `steps`: the trainer stops there and the evaluator measures that version fully."""
    values = json.loads(settings.model_dump_json())
    values["steps"] = steps
    values["evaluator"]["final_version"] = steps
    return build_settings(values, where="the run's settings")


def refuse_other_kind(options: DemoOptions, settings: RunSettings) -> None:
    """Raises `ConfigError` where the run to go on with is of the other kind of demo."""
    if options.feedback != settings.live:
        add = "with" if settings.live else "without"
        raise ConfigError(
            f"the newest run {'learns' if settings.live else 'does not learn'} from feedback: go on with it {add} --feedback"
        )


def refuse_fixed(options: DemoOptions) -> None:
    """Raises `ConfigError` for what a run that is continued has fixed already: its bits follow from it."""
    given = {
        "--seed": options.seed is not None,
        "--environment": options.environment is not None,
        "--control": options.control,
        "--max-lag": options.max_lag is not None,
        "--no-ratio": options.no_ratio,
        "--set": bool(options.overrides),
    }
    fixed = [name for name, is_given in given.items() if is_given]
    if fixed:
        raise ConfigError(f"{', '.join(fixed)} cannot be changed by --continue: begin a new run with it")
