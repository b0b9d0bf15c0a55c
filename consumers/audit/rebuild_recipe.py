"""How a step was trained, as the step itself says: the settings in `train-steps` back to a trainer's configuration. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from pydantic import ValidationError

from rollwire.consumers.trainer.config import TrainerConfig
from rollwire.kernels.policy.config import PolicyConfig
from rollwire.schemas.errors import ConfigError

_MEASURED: Final = {"no_replay_every": 0}  # what is measured beside the arithmetic changes no bit


class Recipe(NamedTuple):
    config: TrainerConfig
    policy: PolicyConfig | None  # None: the arithmetic learner, which has no model


def recipe_of(settings: Mapping[str, str]) -> Recipe:
    """Raises `ConfigError` for the settings of another trainer than the built-in one, or of another release's."""
    named = {name: settings[name] for name in TrainerConfig.model_fields if name in settings}
    try:
        config = TrainerConfig.model_validate({**named, **_MEASURED})
        if settings.get("learner") == "arithmetic":
            return Recipe(config, None)
        if "policy" not in settings:
            raise ConfigError(
                "the step's settings name no policy: it was taken by a trainer of its own kind, which alone can take it "
                "again; `--via deltas` needs no trainer"
            )
        return Recipe(config, PolicyConfig.model_validate_json(settings["policy"]))
    except ValidationError as error:
        raise ConfigError(f"the step's settings are of another release: {error}") from None


def differing(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The settings that differ, for people; empty where none does."""
    names = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    return "; ".join(f"{name}: {then.get(name, 'not said')} -> {now.get(name, 'not said')}" for name in names)
