"""The baseline of attribution: a Faust agent that reads the same two topics, decodes an event and writes one table entry for it.

To its favour: bare fastavro, nothing is checked; its reader is read_uncommitted; an entry is a few bytes under the rollout's
id, and nothing is ever done with it. Settings are those of `streams_faust`: `concurrency=1`, the table in memory with
its changelog on the broker.
"""

from __future__ import annotations

import contextlib
import io
import logging
from typing import Any, Final

from fastavro import schemaless_reader

from rollwire.schemas.codec import schema_for
from rollwire.schemas.framing import PREFIX_BYTES
from rollwire.schemas.records import Feedback, ProductionRollout

TABLE: Final = "entries"


def changelog(prefix: str) -> str:
    """The topic that gets one record an event."""
    return f"{prefix}faust-{TABLE}-changelog"


def run_table(bootstrap: str, prefix: str, partitions: int) -> None:
    """Runs the worker until SIGTERM."""
    import faust

    logging.getLogger("aiokafka").setLevel(logging.ERROR)

    class App(faust.App):
        def _create_directories(self) -> None:
            """The table is in memory: no folders in whatever directory this was started from."""

    app: Any = App(
        f"{prefix}faust",
        broker=f"kafka://{bootstrap}",
        store="memory://",
        autodiscover=False,
        topic_partitions=partitions,
        topic_replication_factor=1,
        topic_disable_leader=True,
        web_enabled=False,
        worker_redirect_stdouts=False,
        broker_commit_interval=1.0,
        stream_wait_empty=False,
        consumer_auto_offset_reset="earliest",
        loghandlers=[],
    )
    raw: dict[str, Any] = {
        "key_type": bytes,
        "value_type": bytes,
        "key_serializer": "raw",
        "value_serializer": "raw",
    }
    rollouts = f"{prefix}production-rollouts"
    source = app.topic(rollouts, f"{prefix}user-feedback", **raw)
    plain: Any = faust.Schema(**raw)
    entries = app.Table(TABLE, partitions=partitions, schema=plain, key_type=bytes, value_type=bytes)
    of_rollout, of_feedback = schema_for(ProductionRollout).avro, schema_for(Feedback).avro

    @app.agent(source, concurrency=1)  # type: ignore[untyped-decorator]
    async def keep(stream: Any) -> None:
        async for event in stream.events():
            value: bytes = event.message.value
            body = io.BytesIO(value)
            body.seek(PREFIX_BYTES)
            is_rollout = event.message.topic == rollouts
            found: Any = schemaless_reader(body, of_rollout if is_rollout else of_feedback, None)
            entry = found["outcome"] if is_rollout else found["feedback_id"]
            entries[found["rollout_id"].encode()] = entry.encode()

    worker: Any = faust.Worker(app, loglevel="ERROR", redirect_stdouts=False, quiet=True)
    worker.spinner = None
    # A worker exits by `SystemExit`, also where it was told to end.
    with contextlib.suppress(SystemExit):
        worker.execute_from_commandline()
