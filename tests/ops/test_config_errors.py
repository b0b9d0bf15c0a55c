"""Unknown settings are refused with the nearest right one."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollwire.ops.config_errors import config_error, suggest
from rollwire.schemas.errors import ConfigError


class Inner(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    learning_rate: float = Field(default=2e-4, gt=0)


class Outer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    steps: int = 250
    trainer: Inner = Inner()
    fleet: Inner | None = None


def _error(values: dict[str, Any]) -> ConfigError:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(values)
    return config_error(caught.value, Outer, where="run.toml")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"stpes": 3}, "run.toml: stpes is not a setting: did you mean steps?"),
        (
            {"trainer": {"learning-rate": 1}},
            "run.toml: trainer.learning-rate is not a setting: did you mean trainer.learning_rate?",
        ),
        (
            {"fleet": {"lerning_rate": 1}},
            "run.toml: fleet.lerning_rate is not a setting: did you mean fleet.learning_rate?",
        ),
        ({"zzz": 3}, "run.toml: zzz is not a setting; there are: fleet, steps, trainer"),
        (
            {"trainer": {"learning_rate": 0}},
            "run.toml: trainer.learning_rate: input should be greater than 0",
        ),
    ],
)
def test_each_problem_is_one_clause(values: dict[str, Any], text: str) -> None:
    error = _error(values)
    assert str(error) == text
    assert error.exit_code == 2


def test_all_problems_are_named_at_once() -> None:
    assert str(_error({"stpes": 1, "trainer": {"learning_rate": -1}})).count(";") == 1


def test_suggestions_ignore_case_and_dashes() -> None:
    assert suggest("Kafka-Port", ["kafka_port", "redis_port"]) == "kafka_port"
    assert suggest("xyzzy", ["kafka_port", "redis_port"]) is None
