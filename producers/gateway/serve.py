"""The gateway wired together: `make_app` for any ASGI server."""

from __future__ import annotations

import asyncio
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from rollwire.producers.gateway.access import Access, LocalQuotas, LocalRepeats, OpenAccess, Quotas, Repeats
from rollwire.producers.gateway.app import GatewayApp, Service
from rollwire.producers.gateway.commit import Committer
from rollwire.producers.gateway.config import GatewayConfig
from rollwire.producers.gateway.dialects.otel import OtelDialect
from rollwire.producers.gateway.dialects.rollwire import RollwireDialect
from rollwire.producers.gateway.head import RequestIds
from rollwire.producers.gateway.intake import Intake
from rollwire.producers.gateway.ledger import Ledger
from rollwire.producers.gateway.openapi import document
from rollwire.schemas.codec import head_of, schema_for
from rollwire.schemas.errors import LogError
from rollwire.schemas.records import Feedback
from rollwire.schemas.rules import Rules, default_rules
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.keys import KeyStore
from rollwire.streams.seams.log import Log, TopicPartition

_PROBE_S: Final = 3.0
_CLOSE_S: Final = 1.0  # `hurry` came before, where the server is ours
TOPIC: Final = "user-feedback"


def make_app(
    log: Log,
    keys: KeyStore,
    secret: bytes,
    *,
    config: GatewayConfig | None = None,
    rules: Rules | None = None,
    access: Access | None = None,
    quotas: Quotas | None = None,
    repeats: Repeats | None = None,
    clock: Clock | None = None,
) -> GatewayApp:
    """The application; its server must run the lifespan protocol, since events go to the log on a thread of its own.

    `keys` seals comments, `secret` makes pseudonyms (`MasterKey.pseudonym_secret`; 32 bytes). What is not given is of this process
    alone: everyone may call, and repeats are remembered here. Raises what a schema registry raises, where one is set.
    """
    config = config or GatewayConfig()  # type: ignore[call-arg,unused-ignore]
    rules = rules or default_rules()
    access = access or OpenAccess()
    quotas = quotas or LocalQuotas()
    repeats = repeats or LocalRepeats()
    clock = clock or SystemClock()
    head_of(schema_for(Feedback))  # a registry is asked here, once: never while somebody waits

    def start() -> Service:
        ledger = Ledger(clock.now_us())
        writer = log.writer()
        committer = Committer(
            writer,
            repeats,
            ledger,
            queue_events=config.queue_events,
            queue_bytes=config.queue_bytes,
            commit_events=config.commit_events,
            write_timeout_s=config.deadline_s,
        )
        intake = Intake(
            config,
            rules=rules,
            access=access,
            quotas=quotas,
            keys=keys,
            secret=secret,
            clock=clock,
            committer=committer,
            ledger=ledger,
        )
        ready = Readiness(log)

        def hurry() -> None:
            intake.stopping = True
            committer.hurry(config.stop_s)

        async def stop() -> None:
            await committer.close(_CLOSE_S)
            intake.close()
            ready.close()
            # Everything was decided: a client that has nothing under way closes at once, and one that does is given up.
            threading.Thread(target=writer.close, daemon=True).start()

        return Service(intake, access, ledger, ready, hurry, stop)

    dialects = (RollwireDialect(), OtelDialect())
    return GatewayApp(
        start,
        dialects,
        document(config, rules),
        RequestIds(secrets.token_hex(4)),
        open_metrics=config.open_metrics,
    )


class Readiness:
    """Asks the broker, one question at a time; whoever asks in the meantime gets the same answer."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ready")
        self._asked: asyncio.Future[str] | None = None

    async def __call__(self) -> str:
        if self._asked is None or self._asked.done():
            self._asked = asyncio.get_running_loop().run_in_executor(self._pool, self._ask)
        try:
            return await asyncio.wait_for(asyncio.shield(self._asked), _PROBE_S)
        except TimeoutError:
            return f"the broker did not answer within {_PROBE_S:g} s"

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self) -> str:
        try:
            self._log.end_offsets([TopicPartition(TOPIC, 0)])
        except LogError as error:
            return str(error)
        return ""
