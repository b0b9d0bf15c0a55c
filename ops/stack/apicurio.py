"""An Apicurio schema registry on 127.0.0.1, in memory: what the tests try Confluent's wire format on.

It is no part of the local stack, whose events need no registry.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rollwire.ops.programs import check_disk, find_java, find_program
from rollwire.ops.stack.ports import HOST, choose_port
from rollwire.ops.stack.processes import end, is_alive, spawn
from rollwire.ops.stack.service import last_words
from rollwire.schemas.errors import EnvironmentMissing, StackError

VERSION: Final = "3.3.3"
MIN_JAVA: Final = 21
_ARTIFACT: Final = f"io.apicurio:apicurio-registry-app:{VERSION}:tar.gz:all"
_COPY: Final = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy"
_FETCH_DEADLINE_S: Final = 900.0
_START_DEADLINE_S: Final = 120.0
_NEEDED_MIB: Final = 640  # 160 MB packed, once more in Maven's own repository, 170 MB unpacked


def ensure_apicurio(cache: Path, report: Callable[[str], None] = lambda _: None) -> Path:
    """The folder of the registry, fetched by Maven if need be. Two processes may call this at once.

    Raises `EnvironmentMissing` where Maven is missing or cannot reach its repository.
    """
    folder = cache / f"apicurio-{VERSION}"
    if folder.is_dir():
        return folder
    check_disk(cache, _NEEDED_MIB)
    with (cache / "apicurio.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held as long as another fetches, which has a deadline
        if not folder.is_dir():
            report(f"fetching Apicurio Registry {VERSION} with Maven (160 MB, once)")
            _fetch(folder)
    return folder


def _fetch(folder: Path) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    command = [
        str(find_program("mvn")), "-B", "-ntp", _COPY, f"-Dartifact={_ARTIFACT}", f"-DoutputDirectory={partial}",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=partial, capture_output=True, text=True, timeout=_FETCH_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentMissing(
            f"Maven had not fetched {_ARTIFACT} after {_FETCH_DEADLINE_S:.0f} s"
        ) from None
    if done.returncode != 0:
        raise EnvironmentMissing(f"Maven could not fetch {_ARTIFACT}: {done.stdout.strip()[-500:]}")
    (packed,) = partial.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(partial, filter="data")
    packed.unlink()
    partial.rename(folder)


@contextmanager
def running_registry(cache: Path, state: Path) -> Iterator[str]:
    """Starts a registry and gives the address of its Confluent API; it ends with the block. Its log is in `state`.

    Raises `EnvironmentMissing` where a Java 21+ or the registry itself cannot be had, `StackError` where it does not start.
    """
    java = find_java(MIN_JAVA)
    folder = ensure_apicurio(cache)
    taken: set[int] = set()
    port, management = (choose_port("registry_port", None, None, taken) for _ in range(2))
    log = state / "apicurio.log"
    process = spawn(
        [str(java), "-Xmx512m", "-XX:TieredStopAtLevel=1", "-jar", str(folder / "quarkus-run.jar")],
        log,
        {
            **os.environ,
            "QUARKUS_HTTP_HOST": HOST,
            "QUARKUS_HTTP_PORT": str(port),
            "QUARKUS_MANAGEMENT_HOST": HOST,
            "QUARKUS_MANAGEMENT_PORT": str(management),
        },
    )
    url = f"http://{HOST}:{port}/apis/ccompat/v7"
    try:
        deadline = time.monotonic() + _START_DEADLINE_S
        while not _answers(f"{url}/subjects"):
            if not is_alive(*process):
                raise StackError(f"the registry ended while it started: {last_words(log)} (log: {log})")
            if time.monotonic() > deadline:
                raise StackError(f"the registry did not answer within {_START_DEADLINE_S:.0f} s (log: {log})")
            time.sleep(0.1)
        yield url
    finally:
        end([process], 10.0)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
