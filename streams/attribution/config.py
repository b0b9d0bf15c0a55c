"""Settings of attribution, also from the environment, for `faust -A rollwire.streams.attribution worker`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollwire.schemas.errors import ConfigError

_VARIABLES: Final = {
    "bootstrap": "ROLLWIRE_BOOTSTRAP",
    "prefix": "ROLLWIRE_PREFIX",
    "model": "ROLLWIRE_MODEL",
    "rules": "ROLLWIRE_RULES",
    "web_host": "ROLLWIRE_ATTRIBUTION_HOST",
    "web_port": "ROLLWIRE_ATTRIBUTION_PORT",
    "clock_skew_s": "ROLLWIRE_CLOCK_SKEW_S",
    "replication": "ROLLWIRE_REPLICATION",
}

GROUP: Final = "attribute"
"""Consumer group of all workers, without the prefix."""

TABLE: Final = "windows"

CHANGELOG: Final = f"{GROUP}-{TABLE}-changelog"
"""Topic of the table, without the prefix; Faust's name for it."""


class AttributionConfig(BaseModel):
    """Where attribution reads and writes, by which rules, and where it shows its tables."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bootstrap: str = Field(default="127.0.0.1:9092", description="address of a broker")
    prefix: str = Field(default="rollwire.", description="prefix of topics and consumer group")
    model: str = Field(default="policy", description="name of the model, under which rules go into the log")
    rules: Path | None = Field(
        default=None, description="rules file; none: the newest in the log, or the built-in ones"
    )
    web_host: str = Field(default="127.0.0.1", description="address that the tables are served on")
    web_port: int = Field(default=0, ge=0, le=65_535, description="port of the tables; 0 = a free one")
    commit_s: float = Field(
        default=1.0,
        gt=0,
        description="time between two commits of what was read; each makes all output durable",
    )
    tick_s: float = Field(default=0.5, gt=0, description="time between two looks for windows that are over")
    clock_skew_s: float = Field(
        default=2.0,
        ge=0,
        description="the broker's clock may be so much behind this one; windows of idle topics close so much later",
    )
    replication: int = Field(default=1, ge=1, description="replication factor of the table's changelog")
    session_timeout_s: float = Field(
        default=10.0, ge=6, description="a silent worker's partitions are given to others after so long"
    )


def config_from_environment(environment: Mapping[str, str] | None = None) -> AttributionConfig:
    """Raises `ConfigError` with the variable's name for a value that is not allowed."""
    environment = os.environ if environment is None else environment
    given = {field: environment[name] for field, name in _VARIABLES.items() if environment.get(name)}
    try:
        return AttributionConfig.model_validate(given)
    except ValidationError as error:
        field = str(error.errors()[0]["loc"][0])
        raise ConfigError(f"{_VARIABLES[field]}={given[field]!r}: {error.errors()[0]['msg']}") from error
