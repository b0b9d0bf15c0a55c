"""What the processes of a stack are doing, and what they have written to their logs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rollwire.ops.stack.external import External, externals
from rollwire.ops.stack.info import SERVICES, ServiceName, StackInfo
from rollwire.ops.stack.lifecycle import log_file
from rollwire.ops.stack.processes import is_alive, resident_bytes
from rollwire.schemas.errors import StackError, StoreUnfit


class ServiceStatus(NamedTuple):
    name: ServiceName
    alive: bool  # for a service that is not ours: it answered a request just now
    external: bool
    pid: int | None  # None: never started, or not ours
    address: str
    uptime_s: float | None  # None: not alive
    memory_bytes: int | None  # resident; None: not alive


def status(info: StackInfo) -> list[ServiceStatus]:
    """Every service of a stack, in the order of `SERVICES`. Those that are not ours are asked, which may take 10 s each."""
    others = externals(info.config)
    return [_asked(others[name]) if name in others else _status_of(name, info) for name in SERVICES]


def _asked(service: External) -> ServiceStatus:
    try:
        service.check()
    except (StackError, StoreUnfit):
        return ServiceStatus(service.name, False, True, None, service.address, None, None)
    return ServiceStatus(service.name, True, True, None, service.address, None, None)


def _status_of(name: ServiceName, info: StackInfo) -> ServiceStatus:
    process = info.services.get(name)
    if process is None:
        return ServiceStatus(name, False, False, None, "", None, None)
    alive = is_alive(process.pid, process.started)
    return ServiceStatus(
        name,
        alive,
        False,
        process.pid,
        process.address,
        time.time() - process.started_unix_s if alive else None,
        resident_bytes(process.pid) if alive else None,
    )


def tail(folder: Path, names: Sequence[ServiceName], lines: int) -> Iterator[tuple[ServiceName, str]]:
    """The last `lines` lines of each log, one service after the other; nothing for a log that is not there."""
    for name in names:
        log = log_file(folder, name)
        if log.exists():
            for line in log.read_text(errors="replace").splitlines()[-lines:] if lines else []:
                yield name, line


def follow(
    folder: Path, names: Sequence[ServiceName], go_on: Callable[[], bool], poll_s: float = 0.2
) -> Iterator[tuple[ServiceName, str]]:
    """Whole lines that are written from now on, as long as `go_on()`; a log that is replaced is read from its start."""
    logs: dict[ServiceName, Path] = {name: log_file(folder, name) for name in names}
    positions = {name: log.stat().st_size if log.exists() else 0 for name, log in logs.items()}
    parts = dict.fromkeys(names, "")
    while go_on():
        quiet = True
        for name, log in logs.items():
            size = log.stat().st_size if log.exists() else 0
            if size < positions[name]:
                positions[name] = 0
            if size > positions[name]:
                with log.open("rb") as source:
                    source.seek(positions[name])
                    written = source.read()
                positions[name] += len(written)
                *whole, parts[name] = (parts[name] + written.decode(errors="replace")).split("\n")
                quiet = False
                for line in whole:
                    yield name, line
        if quiet:
            time.sleep(poll_s)
