"""What the roles of a run have in common: its settings and folder, the stack's addresses, the word to stop."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollwire.ops.settings import RunSettings
from rollwire.ops.stack import StackInfo
from rollwire.ops.stores import stack_store
from rollwire.producers.environments.known import LearnableEnvironment, make_environment
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.store_s3 import S3Store

if TYPE_CHECKING:
    from rollwire.consumers.weights.follow import FollowConfig
    from rollwire.consumers.weights.subscriber import WeightSubscriber


@dataclass(frozen=True, slots=True)
class Run:
    """What every role needs: the run's settings and folder, the stack's addresses, and the word to stop."""

    folder: Path
    settings: RunSettings
    stack: StackInfo
    stop: threading.Event

    def log(self, client: str) -> closing[KafkaLog]:
        """For a `with`, at whose end the log is closed."""
        return closing(KafkaLog(self.stack.bootstrap, prefix=self.settings.prefix, client_id=client))

    def store(self) -> S3Store:
        return open_store(self.stack, self.settings.bucket)


def open_store(stack: StackInfo, bucket: str | None) -> S3Store:
    """The store of a stack, its bucket made where it is missing; None: the stack's own bucket."""
    store = stack_store(stack, bucket)
    store.ensure_bucket()
    return store


def environment_of(settings: RunSettings) -> LearnableEnvironment:
    """Raises `ConfigError` for a name that is not known."""
    return make_environment(settings.environment)


def subscriber_of(
    run: Run,
    log: KafkaLog,
    fleet: str,
    replica: str,
    bucket: str | None = None,
    follow: FollowConfig | None = None,
) -> WeightSubscriber:
    from rollwire.consumers.weights.subscriber import WeightSubscriber

    return WeightSubscriber(
        log,
        run.store() if bucket is None else open_store(run.stack, bucket),
        fleet=fleet,
        replica=replica,
        lineage=run.settings.lineage,
        model=run.settings.model,
        clock=SystemClock(),
        follow=follow,
    )
