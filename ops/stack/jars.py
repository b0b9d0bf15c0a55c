"""The jars of Kafka and S3Proxy: fetched once by Maven into a folder that is named by the digest of `pom.xml`."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rollwire.ops.programs import find_java, find_program
from rollwire.schemas.errors import EnvironmentMissing

POM = Path(__file__).with_name("pom.xml")
JarSet = Literal["kafka", "s3proxy"]
JAR_SETS: tuple[JarSet, ...] = ("kafka", "s3proxy")
_DEADLINE_S = 900.0
_NEEDED_MIB = 512  # 160 MB of jars, and once more in Maven's own repository

Report = Callable[[str], None]


def jar_folder(cache: Path, jars: JarSet) -> Path:
    """Where a set of jars lies, or will lie. Another `pom.xml` has another folder."""
    digest = hashlib.sha256(POM.read_bytes()).hexdigest()[:12]
    return cache / f"jars-{digest}" / jars


def ensure_jars(cache: Path, report: Report) -> None:
    """Fetches what is not there yet. Two processes may call this at once; a killed one leaves nothing half done.

    Raises `EnvironmentMissing` where Maven or Java is missing, or Maven cannot reach its repository.
    """
    if all(jar_folder(cache, jars).is_dir() for jars in JAR_SETS):
        return
    maven = find_program("mvn")
    find_java()
    cache.mkdir(parents=True, exist_ok=True)
    if (free_mib := shutil.disk_usage(cache).free >> 20) < _NEEDED_MIB:
        raise EnvironmentMissing(
            f"the disk of {cache} has {free_mib} MiB free; the jars need {_NEEDED_MIB} MiB: make room"
        )
    with _locked(cache / "jars.lock"):
        for jars in JAR_SETS:
            if not jar_folder(cache, jars).is_dir():
                _fetch(maven, cache, jars, report)


def _fetch(maven: Path, cache: Path, jars: JarSet, report: Report) -> None:
    folder = jar_folder(cache, jars)
    partial = folder.with_name(f".{jars}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_name(f"maven-{jars}.log")
    report(f"fetching the jars of {jars} with Maven (once; log: {log})")
    command = [
        str(maven), "-B", "-ntp", "-f", str(POM), f"-P{jars}",
        "dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={partial}",
    ]  # fmt: skip
    with log.open("w") as out:
        try:
            code = subprocess.run(
                command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, timeout=_DEADLINE_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise EnvironmentMissing(
                f"Maven had not fetched the jars of {jars} after {_DEADLINE_S:.0f} s: see {log}"
            ) from None
    if code.returncode != 0:
        errors = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("[ERROR]")]
        first = errors[0].removeprefix("[ERROR]").strip() if errors else "no error was named"
        raise EnvironmentMissing(
            f"Maven could not fetch the jars of {jars}: {first[:300]} (log: {log}). Check the network and Maven's settings, then try again"
        )
    partial.rename(folder)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # Blocks as long as another process fetches, which has a deadline of its own.
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
