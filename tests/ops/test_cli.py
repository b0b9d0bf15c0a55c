"""The command line: what it says, what it imports, how it ends."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rollwire.ops.cli import COMMANDS, build_app, run
from rollwire.ops.commands.stack import duration

SCRIPT = Path(sys.executable).with_name("rollwire")


def test_help_lists_every_command_and_imports_none_of_them() -> None:
    program = (
        "import sys\n"
        "from rollwire.ops.cli import run\n"
        "code = run(['--help'])\n"
        "heavy = {'torch', 'numpy', 'boto3', 'confluent_kafka', 'redis', 'numba', 'transformers'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert not [name for name in sys.modules if name.startswith('rollwire.ops.commands.')]\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert command.name in done.stdout


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_can_be_loaded_and_describes_itself(
    command: object, capsys: pytest.CaptureFixture[str]
) -> None:
    name = getattr(command, "name", "")
    assert run([name, "--help"]) == 0
    assert f"Usage: rollwire {name}" in capsys.readouterr().out


def test_the_help_of_one_command_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "A seed that breaks a law is printed with the commit" in told
    short = next(command.help for command in COMMANDS if command.name == "simulate")
    assert short not in told


@pytest.mark.parametrize("verb", ["list", "show", "replay", "drop"])
def test_the_verbs_of_dlq_describe_themselves(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dlq", "--help"]) == 0
    assert f" {verb} " in capsys.readouterr().out
    assert run(["dlq", verb, "--help"]) == 0
    assert f"Usage: rollwire dlq {verb}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == "0.1.0"


def test_an_error_of_ours_is_one_sentence_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["status", "--dir", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("rollwire: no stack is running in ")
    assert captured.err.count("\n") == 1


def test_a_port_in_use_ends_with_2_and_nothing_is_left_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        port = server.getsockname()[1]
        assert run(["up", "--dir", str(tmp_path), "--kafka-port", str(port)]) == 2
    assert f"port {port} (kafka_port) is in use" in capsys.readouterr().err
    assert not (tmp_path / "stack.json").exists()


def test_a_value_out_of_range_names_the_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["up", "--s3-port", "99999"]) == 2
    assert "s3_port" in capsys.readouterr().err


def test_a_misspelt_command_ends_with_2_and_the_nearest_one() -> None:
    done = subprocess.run([SCRIPT, "statsu"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert 'Did you mean "status"' in " ".join(done.stderr.replace("│", " ").split())


def test_down_of_nothing_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["down", "--dir", str(tmp_path)]) == 0
    assert "nothing of a stack" in capsys.readouterr().out


def test_two_apps_do_not_share_state() -> None:
    assert build_app() is not build_app()


@pytest.mark.parametrize(
    ("seconds", "text"), [(45, "45 s"), (720, "12 min"), (11_520, "3.2 h"), (354_240, "4.1 d")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
