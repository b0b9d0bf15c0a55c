"""The same join as a Faust agent does it, as a baseline for assemble: one worker, `concurrency=1`, its state in a table.

To its favour: it checks nothing, its reader is read_uncommitted, its writes are at-least-once, and the table holds one entry a rollout
(an entry a group would send the whole group to the changelog at each event). An entry holds what came first of a rollout and
its reward, then both; when all of a group are whole, the group is written and its entries are deleted.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import time
from collections.abc import Callable
from statistics import fmean
from types import TracebackType
from typing import Any, Final, Self

from fastavro import schemaless_reader, schemaless_writer

from rollwire.ops.bench.streams_load import MEMBERS
from rollwire.ops.bench.streams_worker import CONTEXT
from rollwire.schemas.codec import schema_for
from rollwire.schemas.errors import DeadlineExceeded
from rollwire.schemas.framing import PREFIX_BYTES
from rollwire.schemas.records import Group, Reward, Rollout

_STOP_S: Final = 15.0
_LENGTH: Final = 4  # bytes before the rollout of a whole entry


class _Entry:
    """What the table holds of a rollout: a letter, then what came."""

    ROLLOUT, REWARD, BOTH = b"R", b"W", b"B"

    @staticmethod
    def whole(rollout: bytes, reward: bytes) -> bytes:
        return _Entry.BOTH + len(rollout).to_bytes(_LENGTH, "little") + rollout + reward

    @staticmethod
    def parts(entry: bytes) -> tuple[bytes, bytes]:
        end = 1 + _LENGTH + int.from_bytes(entry[1 : 1 + _LENGTH], "little")
        return entry[1 + _LENGTH : end], entry[end:]


def _join(bootstrap: str, prefix: str, partitions: int) -> None:
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
    rollouts = f"{prefix}rollouts"
    source = app.topic(rollouts, f"{prefix}rewards", **raw)
    target = app.topic(f"{prefix}groups", **raw)
    plain: Any = faust.Schema(**raw)
    entries = app.Table("entries", partitions=partitions, schema=plain, key_type=bytes, value_type=bytes)
    avro = {kind: schema_for(kind).avro for kind in (Rollout, Reward, Group)}

    def fields(kind: type[Any], value: bytes) -> Any:
        body = io.BytesIO(value)
        body.seek(PREFIX_BYTES)
        return schemaless_reader(body, avro[kind], None)

    def group_value(values: list[bytes]) -> bytes:
        members = [
            (fields(Rollout, rollout), fields(Reward, reward)["reward"])
            for rollout, reward in map(_Entry.parts, values)
        ]
        first = members[0][0]
        mean = fmean(reward for _, reward in members)
        out = io.BytesIO()
        same = ("group_id", "model", "lineage", "environment", "task_id", "group_size")
        group = {name: first[name] for name in same} | {
            "baseline": "mean",
            "members": [
                {"rollout": rollout, "reward": reward, "advantage": reward - mean, "trace": None}
                for rollout, reward in members
            ],
            "cut": {"inputs": [], "clock_us": time.time_ns() // 1_000},
        }
        schemaless_writer(out, avro[Group], group)
        return out.getvalue()

    @app.agent(source, concurrency=1)  # type: ignore[untyped-decorator]
    async def join(stream: Any) -> None:
        async for event in stream.events():
            value: bytes = event.message.value
            is_rollout = event.message.topic == rollouts
            found = fields(Rollout if is_rollout else Reward, value)
            rollout_id, group = found["rollout_id"].encode(), found["group_id"].encode()
            known = entries.get(rollout_id)
            if known is None:
                entries[rollout_id] = (_Entry.ROLLOUT if is_rollout else _Entry.REWARD) + value
                continue
            entries[rollout_id] = _Entry.whole(*((value, known[1:]) if is_rollout else (known[1:], value)))
            ids = [b"%s.%d" % (group, index) for index in range(MEMBERS)]
            values = [entries.get(id_) for id_ in ids]
            if any(entry is None or entry[:1] != _Entry.BOTH for entry in values):
                continue
            await target.send(key=group, value=group_value(values))
            for id_ in ids:
                del entries[id_]

    worker: Any = faust.Worker(app, loglevel="ERROR", redirect_stdouts=False, quiet=True)
    worker.spinner = None
    # A worker exits by `SystemExit`, also where it was told to end.
    with contextlib.suppress(SystemExit):
        worker.execute_from_commandline()


class FaustWorker:
    """A worker as a process: a context that leaves none behind. `run` takes broker, prefix and the number of partitions."""

    def __init__(
        self, bootstrap: str, prefix: str, partitions: int, run: Callable[[str, str, int], None] = _join
    ) -> None:
        self._process = CONTEXT.Process(target=run, args=(bootstrap, prefix, partitions), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def check(self) -> None:
        """Raises `DeadlineExceeded` where the process has ended."""
        if not self._process.is_alive():
            raise DeadlineExceeded(f"the Faust worker ended with code {self._process.exitcode}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pid = self._process.pid
        if pid is not None and self._process.is_alive():
            os.kill(pid, signal.SIGTERM)
        self._process.join(_STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
