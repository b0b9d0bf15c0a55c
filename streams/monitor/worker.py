"""Runs the monitor's app as a Faust worker in this process."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

import structlog

from rollwire.streams.monitor.config import MonitorConfig, config_from_environment
from rollwire.streams.monitor.ports import free_port
from rollwire.streams.monitor.versions import check_versions, installed

if TYPE_CHECKING:
    from rollwire.streams.monitor.faust_app import MonitorApp

_logger = structlog.get_logger("rollwire.monitor")


def run_monitor(
    bootstrap: str, prefix: str, redis_url: str | None, web_port: int = 0, web_host: str = "127.0.0.1"
) -> None:
    """Runs until SIGTERM or SIGINT; must be called from the main thread, whose signal handlers the worker sets.

    Raises `EnvironmentMissing` where a package is of a version that is not supported.
    """
    check_versions(installed())
    from rollwire.streams.monitor.bounded import run_to_its_end

    config = MonitorConfig(
        bootstrap=bootstrap, prefix=prefix, redis_url=redis_url, web_port=web_port, web_host=web_host
    )
    run_to_its_end(_app(config), "WARNING")


@functools.cache
def app_from_environment() -> MonitorApp:
    return _app(config_from_environment())


def _app(config: MonitorConfig) -> MonitorApp:
    from rollwire.streams.monitor.faust_app import make_app, page_url
    from rollwire.streams.seams.cache_redis import RedisCache
    from rollwire.streams.seams.log_kafka import KafkaLog

    if config.web_port == 0:
        config = config.model_copy(update={"web_port": free_port(config.web_host)})
    logging.getLogger("aiokafka").setLevel(logging.ERROR)
    _logger.info("monitor.start", page=page_url(config))
    log = KafkaLog(config.bootstrap, config.prefix, client_id="monitor")
    return make_app(config, log, None if config.redis_url is None else RedisCache(config.redis_url))
