"""Settings of the monitor, also from the environment, for `faust -A rollwire.streams.monitor worker`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollwire.schemas.errors import ConfigError

_VARIABLES: Final = {
    "bootstrap": "ROLLWIRE_BOOTSTRAP",
    "prefix": "ROLLWIRE_PREFIX",
    "redis_url": "ROLLWIRE_REDIS_URL",
    "web_port": "ROLLWIRE_MONITOR_PORT",
}


class MonitorConfig(BaseModel):
    """Where the monitor reads, and where it shows its page."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bootstrap: str = Field(default="127.0.0.1:9092", description="address of a broker")
    prefix: str = Field(default="rollwire.", description="prefix of topics, consumer group and cache keys")
    redis_url: str | None = Field(
        default=None, description="where snapshots of the page go; None = to nobody but the web port"
    )
    web_host: str = Field(default="127.0.0.1", description="address that the page is served on")
    web_port: int = Field(
        default=6066, ge=0, le=65_535, description="port that the page is served on; 0 = a free one"
    )
    snapshot_s: float = Field(
        default=0.25, gt=0, description="shortest time between two snapshots to the cache"
    )
    rates_s: float = Field(default=1.0, gt=0, description="time between two readings of the end offsets")

    @property
    def page_key(self) -> str:
        """The cache key of the page, as JSON."""
        return f"{self.prefix}monitor/page"

    @property
    def url_key(self) -> str:
        """The cache key of the address that the page is served on."""
        return f"{self.prefix}monitor/url"


def config_from_environment(environment: Mapping[str, str] | None = None) -> MonitorConfig:
    """Raises `ConfigError` with the variable's name for a value that is not allowed."""
    environment = os.environ if environment is None else environment
    given = {field: environment[name] for field, name in _VARIABLES.items() if environment.get(name)}
    try:
        return MonitorConfig.model_validate(given)
    except ValidationError as error:
        field = str(error.errors()[0]["loc"][0])
        raise ConfigError(f"{_VARIABLES[field]}={given[field]!r}: {error.errors()[0]['msg']}") from error
