"""The stack's parts without its servers: processes, ports, records, refusals that come before anything is started."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rollwire.ops.stack import StackConfig, StackInfo, down, log_file, read_stack, up
from rollwire.ops.stack.info import ServiceProcess, new_choices, read_choices, stack_file, write_private
from rollwire.ops.stack.jars import JAR_SETS, ensure_jars, jar_folder
from rollwire.ops.stack.ports import HOST, choose_port, is_free
from rollwire.ops.stack.processes import Spawned, end, is_alive, kill, resident_bytes, spawn, start_time
from rollwire.ops.stack.s3 import s3_service
from rollwire.ops.stack.service import Service, last_words, wait_ready
from rollwire.ops.stack.status import follow, status, tail
from rollwire.schemas.errors import EnvironmentMissing, StackError, StoreUnfit


def _until(condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)


@contextmanager
def _listening() -> Iterator[int]:
    with socket.socket() as server:
        server.bind((HOST, 0))
        server.listen(1)
        yield server.getsockname()[1]


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[Spawned]:
    process = spawn(["/bin/sleep", "300"], tmp_path / "sleep.log")
    yield process
    kill(process)


def test_a_process_is_known_by_pid_and_start_time(sleeper: Spawned) -> None:
    assert is_alive(sleeper.pid, sleeper.started)
    assert not is_alive(sleeper.pid, "another time"), "a later process with the same pid is a stranger"
    assert os.getsid(sleeper.pid) == sleeper.pid, "its own session: the terminal's signals do not reach it"
    assert (resident_bytes(sleeper.pid) or 0) > 0


def test_ended_processes_are_gone_and_leave_no_zombie(tmp_path: Path) -> None:
    process = spawn(["/bin/sleep", "300"], tmp_path / "sleep.log")
    end([process], deadline_s=10)
    assert start_time(process.pid) is None
    assert resident_bytes(process.pid) is None


def test_a_process_that_ignores_the_request_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "stubborn.log"
    process = spawn(["/bin/sh", "-c", "trap '' TERM; echo ready; while true; do sleep 0.05; done"], log)
    _until(lambda: log.read_text() == "ready\n")
    end([process], deadline_s=0.2)
    assert not is_alive(*process)


def test_a_stranger_with_a_recorded_pid_is_left_alone(sleeper: Spawned) -> None:
    end([Spawned(sleeper.pid, "another time")], deadline_s=1)
    assert is_alive(*sleeper)


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissing, match="no-such-program"):
        spawn([str(tmp_path / "no-such-program")], tmp_path / "log")


def _recorded(folder: Path, processes: dict[str, Spawned]) -> StackInfo:
    choices = new_choices()
    services = {
        name: ServiceProcess(pid=pid, started=started, started_unix_s=0, address="", log=folder / "log")
        for name, (pid, started) in processes.items()
    }
    info = StackInfo.model_validate(
        {
            "dir": folder, "bootstrap": "", "s3_endpoint": "", "access_key": choices.access_key,
            "secret_key": choices.secret_key, "bucket": "rollwire", "redis_url": "", "ready": True,
            "services": services, "config": StackConfig(dir=folder),
        }
    )  # fmt: skip
    write_private(stack_file(folder), info.model_dump_json())
    return info


def test_down_ends_only_what_it_started(tmp_path: Path, sleeper: Spawned) -> None:
    ours = spawn(["/bin/sleep", "300"], tmp_path / "ours.log")
    info = _recorded(tmp_path, {"kafka": ours, "redis": Spawned(sleeper.pid, "another time")})
    assert [(one.name, one.alive) for one in status(info)] == [
        ("kafka", True),
        ("s3", False),
        ("redis", False),
    ]
    assert down(tmp_path) == ["kafka"]
    assert not is_alive(*ours)
    assert is_alive(*sleeper)
    assert not stack_file(tmp_path).exists()
    assert down(tmp_path) == []


def test_the_record_holds_a_secret_so_only_its_owner_reads_it(tmp_path: Path) -> None:
    info = _recorded(tmp_path, {})
    assert read_stack(tmp_path) == info
    assert stack_file(tmp_path).stat().st_mode & 0o777 == 0o600


def test_no_record_and_a_damaged_record_are_two_errors(tmp_path: Path) -> None:
    with pytest.raises(StackError, match="no stack is running"):
        read_stack(tmp_path)
    stack_file(tmp_path).write_text("{")
    with pytest.raises(StackError, match="cannot be read"):
        read_stack(tmp_path)


def test_choices_are_fresh_until_they_are_kept(tmp_path: Path) -> None:
    first, second = read_choices(tmp_path), read_choices(tmp_path)
    assert first.secret_key != second.secret_key
    assert len(first.cluster_id) == 22
    assert not first.cluster_id.startswith("-")


def test_a_fixed_port_in_use_is_named() -> None:
    with _listening() as port, pytest.raises(EnvironmentMissing, match=rf"port {port} \(s3_port\) is in use"):
        choose_port("s3_port", port, None, set())


def test_two_services_cannot_be_given_one_port() -> None:
    taken: set[int] = set()
    port = choose_port("kafka_port", None, None, taken)
    with pytest.raises(EnvironmentMissing, match="is in use"):
        choose_port("redis_port", port, None, taken)


def test_the_port_of_last_time_is_taken_again_if_it_is_free() -> None:
    port = choose_port("redis_port", None, None, set())
    assert choose_port("redis_port", None, port, set()) == port
    with _listening() as busy:
        other = choose_port("redis_port", None, busy, set())
        assert other != busy
        assert is_free(other)


def test_up_refuses_a_port_in_use_before_it_starts_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pretend_jars(tmp_path, monkeypatch)
    with _listening() as port, pytest.raises(EnvironmentMissing, match=f"port {port}"):
        up(StackConfig(dir=tmp_path / "stack", redis_port=port, cache=tmp_path))
    assert not stack_file(tmp_path / "stack").exists()
    assert not (tmp_path / "stack" / "logs").exists()


def test_up_refuses_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissing, match="MiB free"):
        up(StackConfig(dir=tmp_path, min_free_mib=1 << 40))


def test_up_refuses_a_missing_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_jars(tmp_path, monkeypatch)
    (tmp_path / "bin" / "redis-server").unlink()
    with pytest.raises(EnvironmentMissing, match=r"redis-server is missing"):
        up(StackConfig(dir=tmp_path / "stack", cache=tmp_path))
    assert not stack_file(tmp_path / "stack").exists()


def _pretend_jars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that are found but never get to run."""
    (tmp_path / "bin").mkdir()
    for name, script in (
        ("java", "echo 'version \"17\"' >&2"),
        ("redis-server", "exit 9"),
        ("mvn", "exit 9"),
    ):
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    for jars in JAR_SETS:
        jar_folder(tmp_path, jars).mkdir(parents=True)


def test_maven_that_fails_leaves_no_jars_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_jars(tmp_path, monkeypatch)
    (tmp_path / "bin" / "mvn").write_text("#!/bin/sh\necho '[ERROR] no route to the repository'; exit 1\n")
    cache = tmp_path / "cache"
    said: list[str] = []
    with pytest.raises(EnvironmentMissing, match=r"no route to the repository .*Check the network"):
        ensure_jars(cache, said.append)
    assert not jar_folder(cache, "kafka").exists()
    assert "fetching the jars of kafka" in said[0]


class _Careless(BaseHTTPRequestHandler):
    """An S3 server that says yes to every put."""

    def _yes(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_PUT = do_DELETE = _yes

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_store_that_ignores_the_condition_is_refused(tmp_path: Path) -> None:
    with ThreadingHTTPServer((HOST, 0), _Careless) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            choices = new_choices().model_copy(update={"s3_port": server.server_port})
            service = s3_service(Path("java"), tmp_path, tmp_path, choices, "rollwire", 128)
            with pytest.raises(StoreUnfit, match="ignores If-None-Match") as caught:
                service.ask()
        finally:
            server.shutdown()
            thread.join(10)
    assert caught.value.exit_code == 2


_MUTE = Service("redis", "nowhere", [], prepare=lambda: None, ask=lambda: False)


def test_a_service_that_ends_while_starting_is_reported_with_its_words(tmp_path: Path) -> None:
    log = tmp_path / "redis.log"
    process = spawn(["/bin/sh", "-c", "echo 'cannot open the door'; sleep 0.2; exit 3"], log)
    with pytest.raises(StackError, match="redis ended while it started: cannot open the door"):
        wait_ready(_MUTE, process, log, 20, threading.Event())


def test_a_service_that_never_answers_meets_the_deadline(tmp_path: Path, sleeper: Spawned) -> None:
    with pytest.raises(StackError, match=r"did not answer within 0 s: it said nothing"):
        wait_ready(_MUTE, sleeper, tmp_path / "none.log", 0.2, threading.Event())


def test_last_words_leave_out_stack_traces(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("starting\nCaused by: the disk is full\n\tat java.base/Thread.run\n")
    assert last_words(log) == "starting | Caused by: the disk is full"


def test_logs_are_followed_in_whole_lines(tmp_path: Path) -> None:
    log = log_file(tmp_path, "kafka")
    log.parent.mkdir()
    log.write_text("one\ntwo\n")
    assert list(tail(tmp_path, ["kafka", "redis"], 1)) == [("kafka", "two")]
    writes = iter(["th", "ree\nfour", "\n"])
    more = iter(range(4))

    def go_on() -> bool:
        with log.open("a") as out:
            out.write(next(writes, ""))
        return next(more, None) is not None

    assert list(follow(tmp_path, ["kafka"], go_on, poll_s=0)) == [("kafka", "three"), ("kafka", "four")]
