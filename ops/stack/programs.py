"""The programs that the stack runs, where they are, and the command that installs one which is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

from rollwire.schemas.errors import EnvironmentMissing

Program = Literal["java", "mvn", "redis-server"]
MIN_JAVA = 17

_NAMES: dict[Program, str] = {
    "java": f"a JDK of version {MIN_JAVA} or later",
    "mvn": "Maven",
    "redis-server": "redis-server",
}
# Family of the system -> command; `{}` takes the package.
_INSTALLERS = {
    "debian": (
        "sudo apt-get install -y {}",
        {"java": "default-jdk-headless", "mvn": "maven", "redis-server": "redis-server"},
    ),
    "fedora": (
        "sudo dnf install -y {}",
        {"java": "java-latest-openjdk-headless", "mvn": "maven", "redis-server": "redis"},
    ),
    "arch": ("sudo pacman -S {}", {"java": "jdk-openjdk", "mvn": "maven", "redis-server": "redis"}),
    "macos": ("brew install {}", {"java": "openjdk", "mvn": "maven", "redis-server": "redis"}),
}


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


def install_hint(program: Program, family: str | None) -> str:
    """What to type to get the program."""
    if family is None:
        return f"install {_NAMES[program]} with the system's package manager"
    command, packages = _INSTALLERS[family]
    return f"`{command.format(packages[program])}`"


def parse_java_version(text: str) -> int | None:
    """The feature release out of what `java -version` prints: 17 from `openjdk version "17.0.15"`, 8 from `"1.8.0_402"`."""
    found = re.search(r'version "(\d+)(?:\.(\d+))?', text)
    if found is None:
        return None
    first, second = int(found[1]), found[2]
    return int(second) if first == 1 and second else first


def _missing(program: Program, why: str) -> EnvironmentMissing:
    release = Path("/etc/os-release")
    family = system_family(sys.platform, release.read_text() if release.exists() else "")
    return EnvironmentMissing(f"{why}: {install_hint(program, family)}, then try again")


def find_program(program: Program) -> Path:
    """Its absolute path; raises `EnvironmentMissing` with the command that installs it."""
    found = shutil.which(program)
    if found is None:
        raise _missing(program, f"{_NAMES[program]} is missing (no `{program}` on the PATH)")
    return Path(found).absolute()


def find_java() -> Path:
    """`$JAVA_HOME/bin/java` or the PATH's, if it is recent enough; raises `EnvironmentMissing` with the command that installs one."""
    home = os.environ.get("JAVA_HOME")
    own = Path(home) / "bin" / "java" if home else None
    java = own if own is not None and own.exists() else find_program("java")
    try:
        # macOS has a `java` that only says there is none, so ask it.
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _missing("java", f"{java} does not run ({error})") from error
    version = parse_java_version(done.stderr + done.stdout)
    if done.returncode != 0 or version is None:
        raise _missing("java", f"{java} is no working Java")
    if version < MIN_JAVA:
        raise _missing("java", f"{java} is Java {version}, but {_NAMES['java']} is needed")
    return java


def check_disk(folder: Path, min_free_mib: int) -> None:
    """Raises `EnvironmentMissing` where the disk under `folder` (made if need be) has less free."""
    folder.mkdir(parents=True, exist_ok=True)
    free_mib = shutil.disk_usage(folder).free >> 20
    if free_mib < min_free_mib:
        raise EnvironmentMissing(
            f"the disk of {folder} has {free_mib} MiB free, but {min_free_mib} MiB are needed: make room or choose another folder"
        )
