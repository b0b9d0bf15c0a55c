"""Starting, ending and repairing the local stack."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from rollwire.ops.programs import check_disk, find_java, find_program
from rollwire.ops.stack.config import StackConfig
from rollwire.ops.stack.external import LOCAL_REGION, externals, kafka_bootstrap, store_at
from rollwire.ops.stack.info import (
    SERVICES,
    Choices,
    ServiceName,
    ServiceProcess,
    StackInfo,
    choices_file,
    find_stack,
    read_choices,
    read_stack,
    stack_file,
    write_private,
)
from rollwire.ops.stack.jars import ensure_jars, jar_folder
from rollwire.ops.stack.kafka import kafka_service
from rollwire.ops.stack.master_key import ensure_master_key
from rollwire.ops.stack.ports import HOST, choose_port
from rollwire.ops.stack.processes import Spawned, end, is_alive, kill, spawn
from rollwire.ops.stack.redis_server import redis_service
from rollwire.ops.stack.s3 import s3_service
from rollwire.ops.stack.service import Cancelled, Service, wait_ready
from rollwire.ops.stack.signing_key import ensure_signing_key
from rollwire.schemas.errors import StackError

Report = Callable[[str], None]
_LOCK_DEADLINE_S = 120.0
_LOG_KEEP_BYTES = 16 << 20


def up(config: StackConfig | None = None, report: Report = lambda _: None) -> StackInfo:
    """Starts what is not running and returns when every service has answered a real request.

    A running stack is left as it is; one of whose processes have ended gets those back, on the same ports. What this
    call started is ended again where it fails. `report` is told each step, for people. Services that `config` names
    are asked, not started; where it names none, those of the stack in the folder stay.

    Raises `ConfigError`, `EnvironmentMissing` (program, port or disk), `StoreUnfit` or `StackError`.
    """
    config = StackConfig() if config is None else config
    folder = config.dir.absolute()
    config = config.model_copy(update={"dir": folder, "cache": config.cache.absolute()})
    check_disk(folder, config.min_free_mib)
    with _locked(folder):
        ensure_master_key(folder)
        ensure_signing_key(folder)
        known = find_stack(folder)
        alive = {} if known is None else _alive(known)
        if known is not None:
            config = _with_known(config, known)
        others = externals(config)
        for service in others.values():
            service.check()
            report(f"{service.name} answers on {service.address}")
        if known is not None and known.ready and len(alive) + len(others) == len(SERVICES):
            return known
        choices = _choose_ports(config, alive)
        write_private(choices_file(folder), choices.model_dump_json(indent=2))
        wanted: list[ServiceName] = [name for name in SERVICES if name not in alive and name not in others]
        return _Start(config, choices, alive, report).run(_services(config, choices, wanted, report))


def down(folder: Path) -> list[ServiceName]:
    """Ends the processes that are recorded in `folder` and still ours; their names. The log and the buckets stay.

    Where nothing is recorded there is nothing to end, and that is no error.
    """
    folder = folder.absolute()
    if not stack_file(folder).exists():
        return []
    with _locked(folder):
        info = find_stack(folder)
        if info is None:
            return []
        alive = _alive(info)
        end([_spawned(process) for process in alive.values()], info.config.stop_deadline_s)
        stack_file(folder).unlink()
        return list(alive)


def kill_service(info: StackInfo, name: ServiceName) -> None:
    """kill -9 of one service, as a fault would; `up(info.config)` brings it back on the same port.

    Raises `StackError` for a service that is not ours.
    """
    if name in info.external:
        raise StackError(f"{name} was not started here: it is not killed")
    kill(_spawned(read_stack(info.dir).services[name]))


def restart_broker(info: StackInfo) -> StackInfo:
    """kill -9 of the broker and a new start on the same port, with its log; the stack as it is then."""
    kill_service(info, "kafka")
    return up(info.config)


@contextmanager
def running_stack(
    folder: Path, config: StackConfig | None = None, report: Report = lambda _: None
) -> Iterator[StackInfo]:
    """A stack in `folder` for as long as the block runs."""
    config = (StackConfig() if config is None else config).model_copy(update={"dir": folder})
    info = up(config, report)
    try:
        yield info
    finally:
        down(folder)


class _Start:
    """One start: the services side by side, each recorded in `stack.json` as soon as its process is there."""

    def __init__(
        self, config: StackConfig, choices: Choices, alive: dict[ServiceName, ServiceProcess], report: Report
    ) -> None:
        self._config = config
        self._choices = choices
        self._processes = dict(alive)
        self._report = report
        self._spawned: list[Spawned] = []
        self._lock = threading.Lock()
        self._cancelled = threading.Event()

    def run(self, services: Sequence[Service]) -> StackInfo:
        before = dict(self._processes)
        try:
            with ThreadPoolExecutor(max_workers=len(SERVICES)) as pool:
                try:
                    waiting = [pool.submit(self._start, service) for service in services]
                    for done in as_completed(waiting):
                        done.result()
                finally:
                    # On an error, and on Ctrl-C: the others stop waiting, and the pool ends.
                    self._cancelled.set()
        except BaseException:
            end(self._spawned, self._config.stop_deadline_s)
            self._processes = before
            if before:
                self._record(ready=False)
            else:
                stack_file(self._config.dir).unlink(missing_ok=True)
            raise
        return self._record(ready=True)

    def _start(self, service: Service) -> None:
        log = log_file(self._config.dir, service.name)
        _rotate(log)
        service.prepare()
        with self._lock:
            if self._cancelled.is_set():
                raise Cancelled(f"the start of {service.name} was given up")
            process = spawn(service.command, log)
            self._spawned.append(process)
            self._processes[service.name] = ServiceProcess(
                pid=process.pid,
                started=process.started,
                started_unix_s=time.time(),
                address=service.address,
                log=log,
            )
            self._record(ready=False)
        self._report(f"{service.name} is starting on {service.address}")
        wait_ready(service, process, log, self._config.start_deadline_s, self._cancelled)
        self._report(f"{service.name} answers on {service.address}")

    def _record(self, *, ready: bool) -> StackInfo:
        choices, config, folder = self._choices, self._config, self._config.dir
        store = None if config.s3 is None else store_at(config.s3)
        info = StackInfo(
            dir=folder,
            bootstrap=f"{HOST}:{choices.kafka_port}"
            if config.kafka is None
            else kafka_bootstrap(config.kafka),
            s3_endpoint=f"http://{HOST}:{choices.s3_port}" if store is None else store.endpoint,
            access_key=choices.access_key if store is None else None,
            secret_key=choices.secret_key if store is None else None,
            region=LOCAL_REGION if store is None else store.region,
            bucket=(None if store is None else store.bucket) or config.bucket,
            redis_url=config.redis or f"redis://{HOST}:{choices.redis_port}/0",
            proxied_port=choices.kafka_proxied_port,
            proxy_port=choices.kafka_proxy_port,
            ready=ready,
            services={name: self._processes[name] for name in SERVICES if name in self._processes},
            config=self._config,
        )
        write_private(stack_file(folder), info.model_dump_json(indent=2))
        return info


def log_file(folder: Path, name: ServiceName) -> Path:
    """Where a service's output goes."""
    return folder / "logs" / f"{name}.log"


def _services(
    config: StackConfig, choices: Choices, wanted: Sequence[ServiceName], report: Report
) -> list[Service]:
    """The services to start; only what these need is looked for on this machine."""
    root, services = config.dir / "stack", list[Service]()
    if "kafka" in wanted or "s3" in wanted:
        java = find_java()
        ensure_jars(config.cache, report)
        if "kafka" in wanted:
            jars = jar_folder(config.cache, "kafka")
            services.append(kafka_service(java, jars, root / "kafka", choices, config.kafka_heap_mib))
        if "s3" in wanted:
            jars = jar_folder(config.cache, "s3proxy")
            services.append(s3_service(java, jars, root / "s3", choices, config.bucket, config.s3_heap_mib))
    if "redis" in wanted:
        redis = find_program("redis-server")
        services.append(redis_service(redis, root / "redis", choices, config.redis_max_memory_mib))
    return services


def _with_known(config: StackConfig, known: StackInfo) -> StackConfig:
    """`config` with the external services of the stack that is there. Raises `StackError` where it names others."""
    stays: dict[str, str | None] = {}
    for name in SERVICES:
        before: str | None = getattr(known.config, name)
        asked: str | None = getattr(config, name)
        if asked is not None and asked != before:
            raise StackError(
                f"the stack in {known.dir} has another {name}: `rollwire down --dir {known.dir}` first, or take another --dir"
            )
        stays[name] = before
    return config.model_copy(update=stays)


def _choose_ports(config: StackConfig, alive: dict[ServiceName, ServiceProcess]) -> Choices:
    before = read_choices(config.dir)
    ports: dict[str, int] = {}
    taken: set[int] = set()
    wanted: list[tuple[str, ServiceName]] = [
        ("kafka_port", "kafka"),
        ("controller_port", "kafka"),
        ("s3_port", "s3"),
        ("redis_port", "redis"),
    ]
    if config.kafka_proxied:
        wanted.append(("kafka_proxied_port", "kafka"))
    for setting, name in wanted:
        if getattr(config, name) is not None:  # not ours to start
            continue
        previous: int | None = getattr(before, setting)
        if name in alive and previous is not None:  # the service holds it
            ports[setting] = previous
            taken.add(previous)
        else:
            ports[setting] = choose_port(setting, getattr(config, setting, None), previous, taken)
    if config.kafka_proxied:
        # While the broker is away its proxy goes on listening: the port is not free, and stays the one it was.
        known = before.kafka_proxy_port
        ports["kafka_proxy_port"] = known or choose_port("kafka_proxy_port", None, None, taken)
    return before.model_copy(update={"kafka_proxied_port": None, "kafka_proxy_port": None, **ports})


def _alive(info: StackInfo) -> dict[ServiceName, ServiceProcess]:
    return {
        name: process for name, process in info.services.items() if is_alive(process.pid, process.started)
    }


def _spawned(process: ServiceProcess) -> Spawned:
    return Spawned(process.pid, process.started)


def _rotate(log: Path) -> None:
    """Keeps one older log, so that a stack that is restarted for months does not fill the disk with them."""
    if log.exists() and log.stat().st_size > _LOG_KEEP_BYTES:
        log.replace(log.with_name(log.name + ".1"))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One `up` or `down` at a time in a folder."""
    deadline = time.monotonic() + _LOCK_DEADLINE_S
    with (folder / "stack.lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StackError(
                        f"another `rollwire up` or `down` has held {folder} for {_LOCK_DEADLINE_S:.0f} s"
                    ) from None
                time.sleep(0.1)
        yield
