"""`rollwire up | down | status | logs`: the local stack."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from rollwire.ops.config_errors import config_error
from rollwire.ops.stack import SERVICES, ServiceName, StackConfig, read_stack
from rollwire.ops.stack import down as end_stack
from rollwire.ops.stack import up as start_stack
from rollwire.ops.stack.external import externals
from rollwire.ops.stack.info import find_stack
from rollwire.ops.stack.jars import ensure_jars
from rollwire.ops.stack.status import follow, tail
from rollwire.ops.stack.status import status as stack_status
from rollwire.schemas.errors import StackError

_STATES = {
    (False, True): "running",
    (False, False): "ended",
    (True, True): "reachable",
    (True, False): "unreachable",
}

Folder = Annotated[Path, Parameter(name="--dir", help="Folder of the stack's state.")]
DEFAULT_DIR = Path(".rollwire")


def up(
    *,
    dir: Folder = DEFAULT_DIR,
    kafka_port: int | None = None,
    controller_port: int | None = None,
    s3_port: int | None = None,
    redis_port: int | None = None,
    kafka: str | None = None,
    s3: str | None = None,
    redis: str | None = None,
) -> None:
    """Start Kafka, an S3 server and Redis on 127.0.0.1, and wait until each has answered a real request.

    What is running stays as it is; the log and the buckets of earlier starts are kept. What you already have is asked and
    used (--kafka, --s3, --redis), the rest is started; every command with this --dir then runs against it.

    Parameters
    ----------
    kafka
        host:port[,host:port] of a Kafka of yours, a plaintext listener.
    s3
        A store of yours: http(s)://host[:port][/bucket], or s3://bucket on AWS. Credentials and region come from
        AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_PROFILE or ~/.aws, never from here.
    redis
        redis[s]://[:password@]host[:port][/db] of a Redis of yours.
    kafka_port
        The broker's port; by default a free one, kept across restarts. So are the others.
    controller_port
        The port of Kafka's controller.
    s3_port
        The S3 server's port.
    redis_port
        Redis's port.
    """
    values = {
        "dir": dir,
        "kafka_port": kafka_port,
        "controller_port": controller_port,
        "s3_port": s3_port,
        "redis_port": redis_port,
        "kafka": kafka,
        "s3": s3,
        "redis": redis,
    }
    try:
        config = StackConfig.model_validate(values)
    except ValidationError as error:
        raise config_error(error, StackConfig, where="the command line") from None
    console = Console(stderr=True, highlight=False)
    began = time.monotonic()
    with _progress(console, "starting the stack") as report:
        info = start_stack(config, report)
    console.print(
        f"the stack is up after {time.monotonic() - began:.1f} s: `rollwire status` shows it, `rollwire down` ends it"
    )
    out = Console(highlight=False)
    shown = {one.name: one.address for one in externals(info.config).values()}
    addresses = {"kafka": info.bootstrap, "s3": info.s3_endpoint, "redis": info.redis_url} | shown
    for name, label in (("kafka", "Kafka"), ("s3", "S3"), ("redis", "Redis")):
        out.print(f"{label:6}{addresses[name]}{' (external)' if name in shown else ''}")


def fetch() -> None:
    """Fetch the jars of Kafka and the S3 server, if they are not there yet. `up` does it too."""
    console = Console(stderr=True, highlight=False)
    config = StackConfig()
    with _progress(console, "fetching") as report:
        ensure_jars(config.cache, report)
    console.print(f"the jars are in {config.cache}")


def down(*, dir: Folder = DEFAULT_DIR) -> None:
    """End what `up` started in this folder; the log and the buckets stay. What it did not start is left alone."""
    known = find_stack(dir)
    ended = end_stack(dir)
    text = f"ended {', '.join(ended)}" if ended else f"nothing of a stack in {dir} was running"
    if known is not None and known.external:
        text += f"; left alone: {', '.join(known.external)}"
    Console(highlight=False).print(text)


def status(*, dir: Folder = DEFAULT_DIR) -> int:
    """Show the services: pid, address, uptime, memory. Exit code 0 only if all of them run."""
    states = stack_status(read_stack(dir))
    table = Table(box=None, pad_edge=False)
    for column in ("service", "state", "pid", "address", "uptime", "memory"):
        table.add_column(column, justify="right" if column in {"pid", "uptime", "memory"} else "left")
    for one in states:
        table.add_row(
            one.name,
            _STATES[one.external, one.alive],
            "external" if one.external else "" if one.pid is None else str(one.pid),
            one.address,
            "" if one.uptime_s is None else duration(one.uptime_s),
            "" if one.memory_bytes is None else f"{one.memory_bytes / 2**20:.0f} MiB",
        )
    Console(highlight=False).print(table)
    return 0 if all(one.alive for one in states) else 1


def logs(
    service: ServiceName | None = None,
    /,
    *,
    dir: Folder = DEFAULT_DIR,
    lines: Annotated[int, Parameter(name=["--lines", "-n"])] = 50,
    follow_on: Annotated[bool, Parameter(name=["--follow", "-f"], negative=())] = False,
) -> None:
    """Print the logs of the services.

    Parameters
    ----------
    service
        One of kafka, s3, redis; by default all.
    lines
        How many of the last lines of each log.
    follow_on
        Go on with what is written from now on, until Ctrl-C.
    """
    names: tuple[ServiceName, ...] = SERVICES if service is None else (service,)
    if not (dir / "logs").is_dir():
        raise StackError(f"there are no logs in {dir}: no stack was started there")
    out = Console(highlight=False, soft_wrap=True, markup=False)
    for name, line in tail(dir, names, lines):
        out.print(f"{name:5} {line}" if service is None else line)
    if follow_on:
        for name, line in follow(dir, names, lambda: True):
            out.print(f"{name:5} {line}" if service is None else line)


@contextmanager
def _progress(console: Console, first: str) -> Iterator[Callable[[str], None]]:
    """One changing line on a terminal; a line for each step elsewhere."""
    with console.status(first) as shown:

        def report(text: str) -> None:
            shown.update(text)
            if not console.is_terminal:
                console.print(text)

        yield report


def duration(seconds: float) -> str:
    """45 s, 12 min, 3.2 h, 4.1 d."""
    for limit, unit, divisor in ((90, "s", 1), (5_400, "min", 60), (129_600, "h", 3_600)):
        if seconds < limit:
            return f"{seconds / divisor:.0f} {unit}" if divisor < 3_600 else f"{seconds / divisor:.1f} {unit}"
    return f"{seconds / 86_400:.1f} d"
