"""The processes of a run, one function each: it wires a component to the live log, store and engine and runs it.

A role ends when its work is done, on SIGTERM or SIGINT (within 10 s), or when the process that started it is gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from rollwire.ops.logs import configure_logging
from rollwire.ops.memory import tune_memory
from rollwire.ops.parent import stop_with_parent
from rollwire.ops.registry import set_registry
from rollwire.ops.role_run import Run, environment_of, subscriber_of
from rollwire.ops.settings import load_settings
from rollwire.ops.stack import read_stack
from rollwire.ops.stack.master_key import master_key_file
from rollwire.ops.stopping import stop_on_signals
from rollwire.ops.telling import tell_settings
from rollwire.schemas.errors import ConfigError
from rollwire.streams.seams.clock import SystemClock

if TYPE_CHECKING:
    from pydantic import BaseModel

    from rollwire.streams.assemble_config import JoinConfig


EVALUATOR_ROWS = 512  # requests that the evaluator decodes at once


def run_fleet_role(run: Run) -> None:
    from rollwire.ops.engines import open_engine
    from rollwire.producers.fleet import run_fleet

    settings = run.settings
    fleet = settings.fleet
    with (
        run.log("fleet") as log,
        closing(
            subscriber_of(run, log, fleet.fleet, fleet.replica, fleet.weights_bucket, settings.follow)
        ) as subscriber,
        open_engine(settings, subscriber) as (engine, weights),
    ):
        tell_settings(run, log, "fleet", {"fleet": fleet, "follow": settings.follow})
        run_fleet(
            log,
            engine,
            environment_of(settings),
            weights,
            settings.fleet.model_copy(update={"num_experts": settings.policy.num_experts}),
            model=settings.model,
            lineage=settings.lineage,
            prefix=settings.prefix,
            stop=run.stop,
            clock=SystemClock(),
            store=run.store(),
        )


def run_verifier_role(run: Run) -> None:
    from rollwire.producers.verifier.verifier import run_verifier

    with run.log("verifier") as log:
        run_verifier(
            log,
            environment_of(run.settings),
            run.settings.verifier,
            prefix=run.settings.prefix,
            stop=run.stop,
            clock=SystemClock(),
        )


def run_assemble_role(run: Run) -> None:
    _assemble(run, run.settings.assemble, "assemble")


def run_assemble_production_role(run: Run) -> None:
    _assemble(run, run.settings.production, "production")


def _assemble(run: Run, config: JoinConfig, section: str) -> None:
    from rollwire.streams.run_assemble import run_assemble

    tune_memory()
    with run.log(config.kind.name) as log:
        tell_settings(run, log, config.kind.name, {section: config})
        run_assemble(
            log,
            config,
            prefix=run.settings.prefix,
            partitions=None,
            stop=run.stop,
            clock=SystemClock(),
            runtime=run.settings.runtime,
        )


def run_pack_role(run: Run) -> None:
    from rollwire.streams.run_pack import run_pack

    settings = run.settings
    config = settings.pack.for_policy(settings.policy)
    tune_memory()
    with run.log("pack") as log:
        tell_settings(run, log, "pack", {"pack": config})
        run_pack(
            log,
            config,
            prefix=settings.prefix,
            model=settings.model,
            lineage=settings.lineage,
            stop=run.stop,
            clock=SystemClock(),
            runtime=run.settings.runtime,
        )


def run_trainer_role(run: Run) -> None:
    from rollwire.consumers.trainer.connect import LiveKeys, LiveStack
    from rollwire.consumers.trainer.run import run_trainer
    from rollwire.ops.warm import load_warm_start

    settings = run.settings
    store = run.store()
    store.probe()
    with run.log("trainer") as log:
        tell_settings(run, log, "trainer", _training(run))
        run_trainer(
            log,
            store,
            settings.policy,
            settings.trainer,
            publisher_config=settings.publisher,
            prefix=settings.prefix,
            model=settings.model,
            lineage=settings.lineage,
            initial=load_warm_start(settings),
            stop=run.stop,
            until_step=settings.steps,
            clock=SystemClock(),
            connect=LiveStack(
                run.stack.bootstrap,
                settings.prefix,
                run.stack.s3_endpoint,
                settings.bucket or run.stack.bucket,
                run.stack.access_key,
                run.stack.secret_key,
                run.stack.region,
                settings.schema_registry_url,
            ),
            keys=LiveKeys(
                master_key_file(run.stack.dir),
                run.stack.s3_endpoint,
                run.stack.bucket,  # people's keys are the stack's, wherever a run keeps its weights
                run.stack.access_key,
                run.stack.secret_key,
                run.stack.region,
            ),
        )


def _training(run: Run) -> dict[str, BaseModel]:
    settings = run.settings
    return {"trainer": settings.trainer, "policy": settings.policy, "publisher": settings.publisher}


def run_arithmetic_trainer_role(run: Run) -> None:
    """In the trainer's place, with its settings, transactional id and events: for fault tests. Needs no torch."""
    from rollwire.consumers.trainer.arithmetic import run_arithmetic_trainer

    settings = run.settings
    store = run.store()
    store.probe()
    with run.log("arithmetic-trainer") as log:
        tell_settings(run, log, "trainer", _training(run))
        run_arithmetic_trainer(
            log,
            store,
            settings.trainer,
            publisher_config=settings.publisher,
            prefix=settings.prefix,
            model=settings.model,
            lineage=settings.lineage,
            stop=run.stop,
            until_step=settings.steps,
            clock=SystemClock(),
        )


def run_evaluator_role(run: Run) -> None:
    from rollwire.consumers.evaluator import run_evaluator
    from rollwire.producers.engine_torch import TorchEngine

    settings = run.settings
    with (
        run.log("evaluator") as log,
        closing(subscriber_of(run, log, settings.evaluator.fleet, settings.evaluator.replica)) as weights,
    ):
        run_evaluator(
            log,
            TorchEngine(settings.policy, EVALUATOR_ROWS),
            environment_of(settings),
            weights,
            settings.evaluator,
            model=settings.model,
            lineage=settings.lineage,
            prefix=settings.prefix,
            stop=run.stop,
            clock=SystemClock(),
        )


def run_monitor_role(run: Run) -> None:
    from rollwire.streams.monitor import run_monitor

    run_monitor(
        run.stack.bootstrap,
        run.settings.prefix,
        run.stack.redis_url,
        run.settings.monitor_port,
    )


def run_gateway_role(run: Run) -> None:
    from rollwire.ops.gateway import gateway_app, read_rules, run_gateway

    settings, config = run.settings, run.settings.gateway
    with (
        run.log("gateway") as log,
        gateway_app(
            run.stack,
            log,
            config,
            prefix=settings.prefix,
            rules=read_rules(config.rules),
            bucket=settings.bucket,
        ) as app,
    ):
        run_gateway(app, config, run.stop, ready=lambda url: structlog.get_logger().info("gateway", url=url))


def run_attribute_role(run: Run) -> None:
    from rollwire.ops.gateway import read_rules
    from rollwire.ops.windows import check_windows
    from rollwire.streams.attribution.worker import run_attribution

    settings = run.settings
    rules = settings.attribution.rules or settings.gateway.rules
    if rules is not None:  # else those of the log hold on
        check_windows(read_rules(rules), settings)
    with run.log("attribute") as log:
        tell_settings(run, log, "attribute", {"attribution": settings.attribution})
    run_attribution(
        settings.attribution.model_copy(
            update={
                "bootstrap": run.stack.bootstrap,
                "prefix": settings.prefix,
                "model": settings.model,
                "rules": rules,
            }
        )
    )


def run_serving_role(run: Run) -> None:
    from rollwire.ops.serving import run_serving

    run_serving(run)


def run_people_role(run: Run) -> None:
    from rollwire.ops.demo.feedback.crowd import run_crowd

    run_crowd(run)


def run_archive_role(run: Run) -> None:
    from rollwire.ops.archive_metrics import ArchiveCounts, exposed
    from rollwire.ops.signing import open_signer
    from rollwire.streams.archive.run_archive import run_archive

    store = run.store()
    store.probe()
    counts = ArchiveCounts(SystemClock())
    with run.log("archive") as log, exposed(counts, run.settings.archive.metrics_port):
        run_archive(
            log,
            store,
            open_signer(run.stack.dir),
            run.settings.archive,
            name=run.settings.prefix.rstrip("."),
            clock=SystemClock(),
            stop=run.stop,
            done=counts.add,
        )


def run_warm_start_role(run: Run) -> None:
    from rollwire.ops.warm import make_warm_start

    make_warm_start(run.settings, progress_file=run.folder / "warm-start.json")


ROLES: dict[str, Callable[[Run], None]] = {
    "warm-start": run_warm_start_role,
    "fleet": run_fleet_role,
    "verifier": run_verifier_role,
    "assemble": run_assemble_role,
    "assemble-production": run_assemble_production_role,
    "pack": run_pack_role,
    "trainer": run_trainer_role,
    "arithmetic-trainer": run_arithmetic_trainer_role,
    "evaluator": run_evaluator_role,
    "monitor": run_monitor_role,
    "gateway": run_gateway_role,
    "attribute": run_attribute_role,
    "serving": run_serving_role,
    "people": run_people_role,
    "archive": run_archive_role,
}
OWN_SIGNALS = frozenset({"monitor", "attribute"})  # a Faust worker has its own signal handlers


def run_role(name: str, folder: Path, stack_dir: Path) -> None:
    """Runs one role to its end. Raises `ConfigError` for a name that is no role."""
    if name not in ROLES:
        raise ConfigError(f"there is no role {name!r}; there are: {', '.join(ROLES)}")
    configure_logging()
    stop = threading.Event()
    if name not in OWN_SIGNALS:
        stop_on_signals(stop)
    stop_with_parent(stop)
    settings = load_settings(folder)
    set_registry(settings.schema_registry_url, settings.prefix)
    ROLES[name](Run(folder, settings, read_stack(stack_dir), stop))
