"""What is known of a running stack: `stack.json`, which exists while the stack runs, and `choices.json`, which stays.

`stack.json` is written after each process that starts, so that `down` finds all of them even when `up` was killed.
Both hold the S3 secret and are readable by their owner only.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import uuid
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from rollwire.ops.stack.config import StackConfig
from rollwire.schemas.errors import StackError

ServiceName = Literal["kafka", "s3", "redis"]
SERVICES: tuple[ServiceName, ...] = ("kafka", "s3", "redis")


class ServiceProcess(BaseModel):
    """One process of the stack. `started` tells it from another process that got the same pid later."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pid: int
    started: str  # start time as the system tells it; opaque, see processes.start_time
    started_unix_s: float  # for people
    address: str
    log: Path


class Choices(BaseModel):
    """What was chosen at the first start and is used again at every later one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cluster_id: str
    access_key: str
    secret_key: str
    kafka_port: int | None = None
    controller_port: int | None = None
    kafka_proxied_port: int | None = None  # of the broker's second listener ...
    kafka_proxy_port: int | None = None  # ... and what it advertises there: the proxy's
    s3_port: int | None = None
    redis_port: int | None = None


class StackInfo(BaseModel):
    """A stack: how to reach it, and its processes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dir: Path
    bootstrap: str  # of Kafka, host:port
    s3_endpoint: str | None  # URL; None = AWS's own
    access_key: str | None  # None = from the environment or AWS's files, for a store that is not ours
    secret_key: str | None
    region: str = "us-east-1"
    bucket: str
    redis_url: str
    proxied_port: int | None = None  # the listener behind a proxy, and
    proxy_port: int | None = None  # the proxy's own port, which that listener advertises
    ready: bool  # every service has answered a real request
    services: dict[ServiceName, ServiceProcess]
    config: StackConfig

    @property
    def external(self) -> tuple[ServiceName, ...]:
        """The services that are not ours: neither started nor ended here."""
        return tuple(name for name in SERVICES if getattr(self.config, name) is not None)

    @property
    def pids(self) -> dict[ServiceName, int]:
        return {name: process.pid for name, process in self.services.items()}


def new_choices() -> Choices:
    """Fresh identity and credentials; the cluster id has the form that Kafka gives its own (22 characters)."""
    cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    # A leading dash would read as an option on the formatter's command line.
    cluster_id = "A" + cluster_id[1:] if cluster_id.startswith("-") else cluster_id
    return Choices(
        cluster_id=cluster_id,
        access_key=f"RW{secrets.token_hex(9).upper()}",
        secret_key=secrets.token_hex(20),
    )


def stack_file(folder: Path) -> Path:
    return folder / "stack.json"


def choices_file(folder: Path) -> Path:
    return folder / "stack" / "choices.json"


def read_stack(folder: Path) -> StackInfo:
    """The stack recorded in `folder`; whether its processes still live is `status`'s question.

    Raises `StackError` where none is recorded or the record cannot be read.
    """
    path = stack_file(folder)
    try:
        return StackInfo.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise StackError(
            f"no stack is running in {folder}: start one with `rollwire up --dir {folder}`"
        ) from None
    except ValidationError as error:
        raise StackError(
            f"{path} cannot be read ({error.error_count()} errors): end the stack's processes by hand, then delete it"
        ) from error


def find_stack(folder: Path) -> StackInfo | None:
    """As `read_stack`, but None where no stack is recorded."""
    return read_stack(folder) if stack_file(folder).exists() else None


def read_choices(folder: Path) -> Choices:
    """The choices of earlier starts, or new ones."""
    path = choices_file(folder)
    try:
        return Choices.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return new_choices()
    except ValidationError as error:
        raise StackError(
            f"{path} cannot be read: delete {path.parent}, which also deletes the log and the buckets"
        ) from error


def write_private(path: Path, text: str) -> None:
    """Replaces `path` whole, or not at all; mode 0600."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        partial.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
