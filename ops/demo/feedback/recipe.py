"""What differs from an ordinary run where the policy learns from people's clicks."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rollwire.ops.settings import RunSettings, build_settings
from rollwire.ops.stack.ports import choose_port
from rollwire.schemas.errors import ConfigError

FEEDBACK_STEPS: Final = 60
RULES_FILE: Final = "rules.toml"
_ENVIRONMENT: Final = "countdown"


def feedback_recipe(seed: int, environment: str) -> dict[str, Any]:
    """Sections of the run's settings. Raises `ConfigError` for an environment that the simulated people do not know.

    One sample a prompt makes noisy gradients: half the ordinary rate, and 128 answers a step of which 35 % are silent.
    """
    if environment != _ENVIRONMENT:
        raise ConfigError(f"the people of --feedback know {_ENVIRONMENT} alone, not {environment!r}")
    return {
        "trainer": {
            "learning_rate": 1e-4,
            "routing_replay": False,  # routes would tell what is sealed, so live traffic has none
            "no_replay_every": 0,
            "checkpoint_every": 20,
        },
        "pack": {
            "groups_per_step": 128,
            "max_lag_versions": 12,
            "cohort": {
                "production_share": 1.0,
                "max_age_s": 60.0,
                "coverage_floor": 0.1,
                "coverage_min_rollouts": 10,
            },
        },
        "production": {"group_deadline_s": 60.0, "late_horizon_s": 3600.0},
        "gateway": {"port": 0},
        "serving": {"port": 0, "seed": seed},
        "attribution": {"commit_s": 0.3, "tick_s": 0.2, "clock_skew_s": 0.5},
        "people": {"seed": seed},
    }


def lay_over(values: dict[str, Any], over: Mapping[str, Any]) -> None:
    """Sections of `over` into those of `values`, key by key."""
    for section, chosen in over.items():
        values.setdefault(section, {}).update(chosen)


def settle(folder: Path, settings: RunSettings) -> RunSettings:
    """What only a run's folder and this machine can say: its rules file, and ports that stay through restarts."""
    rules = folder / RULES_FILE
    if settings.gateway.rules is None:
        shutil.copyfile(Path(__file__).parent / RULES_FILE, rules)
    values = settings.model_dump(mode="json")
    values["gateway"]["rules"] = str(settings.gateway.rules or rules.absolute())
    taken: set[int] = set()
    for role in ("gateway", "serving"):
        if values[role]["port"] == 0:
            values[role]["port"] = choose_port(f"{role}.port", None, None, taken)
    return build_settings(values, where="the run's settings")
