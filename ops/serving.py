"""A serving replica on a stack: its engine, weights and keys opened, its HTTP front run. The role `serving` is this."""

from __future__ import annotations

from contextlib import ExitStack, closing

import structlog

from rollwire.ops.engines import open_engine
from rollwire.ops.http_server import served
from rollwire.ops.keys import open_keys, pseudonym_secret
from rollwire.ops.role_run import Run, environment_of, subscriber_of
from rollwire.producers.serving.answer import Classify, by_finish
from rollwire.producers.serving.front import make_front
from rollwire.producers.serving.outcomes import of_expressions
from rollwire.producers.serving.serving import Serving
from rollwire.schemas.errors import EnvironmentMissing
from rollwire.schemas.pseudonyms import pseudonym_of
from rollwire.streams.seams.erasures import ErasureFollower

_log = structlog.get_logger("rollwire.serving")


def run_serving(run: Run) -> None:
    """Answers until `run.stop`. Raises `EnvironmentMissing` where the port is taken, and as `Serving.run`."""
    settings, config = run.settings, run.settings.serving
    environment = environment_of(settings)
    classify: Classify = by_finish
    if settings.environment == "countdown":
        classify = of_expressions(environment, environment.end_id)
    secret = pseudonym_secret(run.stack)
    keys = open_keys(run.stack)
    with (
        run.log("serving") as log,
        closing(ErasureFollower(log, keys.forget)),
        closing(subscriber_of(run, log, config.fleet, config.replica, follow=settings.follow)) as subscriber,
        open_engine(settings, subscriber) as (engine, weights),
    ):
        serving = Serving(
            log,
            engine,
            weights,
            keys,
            config,
            model=settings.model,
            lineage=settings.lineage,
            end_id=environment.end_id,
            classify=classify,
        )
        front = make_front(
            serving, environment, lambda subject: pseudonym_of(secret, config.tenant, subject), config
        )
        with ExitStack() as opened:
            try:
                at = opened.enter_context(served(front, host=config.host, port=config.port))
            except OSError as error:
                raise EnvironmentMissing(
                    f"port {config.port} on {config.host}: {error}; choose another serving.port"
                ) from error
            _log.info("serving", url=at.url)
            serving.run(run.stop)
