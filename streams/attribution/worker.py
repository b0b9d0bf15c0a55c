"""Runs attribution as a Faust worker in this process."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

import structlog

from rollwire.streams.attribution.config import AttributionConfig, config_from_environment
from rollwire.streams.monitor.ports import free_port
from rollwire.streams.monitor.versions import check_versions, installed

if TYPE_CHECKING:
    from rollwire.streams.attribution.faust_app import AttributionApp

_logger = structlog.get_logger("rollwire.attribution")


def run_attribution(config: AttributionConfig) -> None:
    """Runs until SIGTERM or SIGINT; must be called from the main thread, whose signal handlers the worker sets.

    Raises `EnvironmentMissing` where a package is of a version that is not supported, `ConfigError` for bad rules,
    `TopicMismatch` where topics are missing, `LogError` where the broker is away.
    """
    check_versions(installed(), "attribution")
    from rollwire.streams.monitor.bounded import run_to_its_end

    run_to_its_end(build_app(config), "ERROR")


@functools.cache
def app_from_environment() -> AttributionApp:
    return build_app(config_from_environment())


def build_app(config: AttributionConfig) -> AttributionApp:
    """The app, its rules read and written to the log. Raises as `run_attribution`."""
    from rollwire.streams.attribution.faust_app import make_app
    from rollwire.streams.attribution.look import Look
    from rollwire.streams.seams.clock import SystemClock
    from rollwire.streams.seams.log_kafka import KafkaLog

    if config.web_port == 0:
        config = config.model_copy(update={"web_port": free_port(config.web_host)})
    logging.getLogger("aiokafka").setLevel(logging.ERROR)
    log, clock = KafkaLog(config.bootstrap, config.prefix, client_id="attribution"), SystemClock()
    look = Look(log, clock, round(config.clock_skew_s * 1e6))
    rules = look.start_rules(config.rules, config.model).newest
    _logger.info(
        "attribution.start",
        tables=f"http://{config.web_host}:{config.web_port}/coverage",
        rules=None if rules is None else f"{rules.name} {rules.verifier_version}",
    )
    return make_app(config, log, look, clock)
