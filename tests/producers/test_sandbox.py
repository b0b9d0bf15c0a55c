"""The evaluator's process under hostile answers: a hang, a death or a bomb costs one verdict and nothing else."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rollwire.producers.environments.countdown import END_ID, Countdown, encode_text
from rollwire.producers.verifier.frames import (
    BadFrame,
    FrameReader,
    ScoreReply,
    ScoreRequest,
    decode_reply,
    encode_reply,
)
from rollwire.producers.verifier.sandbox import UNSCORABLE, Sandbox, SandboxConfig
from rollwire.schemas.errors import EnvironmentMissing
from rollwire.streams.seams.environment import Verdict

# What the text of a task makes this environment do. It stands for whatever bug an evaluator may have.
HOSTILE = """
import os, socket, sys
from rollwire.streams.seams.environment import Verdict

class Hostile:
    calls = 0
    def score(self, task, sampled_ids, finish_reason):
        Hostile.calls += 1
        if task == "hang":
            while True: pass
        if task == "exit": os._exit(3)
        if task == "poisoned" and Hostile.calls > 1: os._exit(4)
        if task == "allocate": return Verdict(float(len(bytearray(10**9))), (), "allocated")
        if task == "raise": raise RuntimeError("a bug")
        if task == "recurse":
            def down(): return down()
            down()
        if task == "open": open("/etc/hostname")
        if task == "connect": socket.socket()
        if task == "fork":
            child = os.fork()
            while child == 0: pass
            return Verdict(float(child), (), "forked")
        if task == "nan": return Verdict(float("nan"), (), "nan")
        if task == "babble": os.write(0, b"\\xff" * 64)
        if task == "huge": return Verdict(1.0, (), "x" * 1_000_000)
        if task == "stderr":
            for _ in range(1000): print("x" * 1000, file=sys.stderr)
        if task == "env": return Verdict(float("ROLLWIRE_SECRET" in os.environ), (), "env")
        return Verdict(1.0, (("parses", 1.0),), "right")
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    path = tmp_path / "hostile.py"
    path.write_text(HOSTILE)
    return f"{path}:Hostile"


@pytest.fixture
def hostile(target: str) -> Iterator[Sandbox]:
    with Sandbox(target, SandboxConfig(answer_s=0.4, memory_mb=64)) as sandbox:
        yield sandbox


def ask(*tasks: str) -> list[ScoreRequest]:
    return [ScoreRequest(task, b"", "stop") for task in tasks]


GOOD = Verdict(1.0, (("parses", 1.0),), "right")


@pytest.mark.parametrize("task", ["hang", "exit", "allocate", "nan", "babble", "huge"])
def test_the_culprit_is_unscorable_and_its_neighbours_are_scored(hostile: Sandbox, task: str) -> None:
    verdicts = hostile.score(ask("good", "good", task, "good"))
    assert verdicts == [GOOD, GOOD, Verdict(None, (), UNSCORABLE), GOOD]
    assert hostile.unscorable == 1
    assert hostile.restarts == 2  # the first try and the one alone
    assert hostile.score(ask("good")) == [GOOD]


@pytest.mark.parametrize(
    ("task", "error"),
    [("raise", "RuntimeError"), ("recurse", "RecursionError"), ("open", "OSError"), ("connect", "OSError")],
)
def test_a_fault_of_the_environment_is_no_zero(hostile: Sandbox, task: str, error: str) -> None:
    verdicts = hostile.score(ask("good", task, "good"))
    assert verdicts == [GOOD, Verdict(None, (), f"unscorable: {error}"), GOOD]
    assert hostile.restarts == 0


def test_no_processes_or_none_that_outlive_it(hostile: Sandbox) -> None:
    (verdict,) = hostile.score(ask("fork"))
    if os.geteuid() != 0:  # RLIMIT_NPROC binds everybody but root
        assert verdict == Verdict(None, (), "unscorable: BlockingIOError")
        return
    assert verdict.reward is not None
    grandchild = int(verdict.reward)
    hostile.close()
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        command = ["ps", "-o", "stat=", "-p", str(grandchild)]
        state = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        if not state or state.startswith("Z"):
            return
    pytest.fail(f"process {grandchild} outlived its sandbox")


def test_a_neighbours_poison_is_healed_by_the_retry_alone(hostile: Sandbox) -> None:
    assert hostile.score(ask("good", "poisoned", "good")) == [GOOD, GOOD, GOOD]
    assert hostile.unscorable == 0
    assert hostile.restarts == 1


def test_output_on_standard_error_does_not_stop_it(hostile: Sandbox) -> None:
    assert hostile.score(ask("stderr", "good")) == [GOOD, GOOD]


def test_our_environment_is_not_passed_on(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLWIRE_SECRET", "key")
    with Sandbox(target) as sandbox:
        assert sandbox.score(ask("env")) == [Verdict(0.0, (), "env")]


def test_a_flood_of_hangs_ends_at_the_budget_with_progress(hostile: Sandbox) -> None:
    began = time.monotonic()
    verdicts = hostile.score(ask("good", *["hang"] * 50), budget_s=1.0)
    assert time.monotonic() - began < 10.0
    assert verdicts[:2] == [GOOD, Verdict(None, (), UNSCORABLE)]
    assert len(verdicts) < 51
    assert hostile.score(ask("hang"), budget_s=0.0) == [Verdict(None, (), UNSCORABLE)]
    assert hostile.score(ask("good")) == [GOOD]


def test_close_ends_the_process(hostile: Sandbox) -> None:
    hostile.score(ask("good"))
    pid = hostile.pid
    assert pid is not None
    hostile.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    "target", ["rollwire.nowhere:Countdown", "rollwire.producers.environments.countdown:Nothing"]
)
def test_an_environment_that_is_not_there_is_named(target: str) -> None:
    with Sandbox(target) as sandbox, pytest.raises(EnvironmentMissing, match="ConfigError: no environment"):
        sandbox.score(ask("good"))


def test_countdown_scores_as_in_process() -> None:
    countdown = Countdown()
    texts = ["(7-3)*12", "7*3+12", "1+2", "(" * 1000, "9" * 5000, "(((", "12/(7-3-4)", "7--3*12"]
    requests: list[ScoreRequest] = []
    expected: list[Verdict] = []
    for seed in range(1_024):
        task = countdown.reset(seed)
        ids_S = np.append(encode_text(texts[seed % len(texts)]), END_ID)
        requests.append(ScoreRequest(task.task, ids_S.astype("<i8").tobytes(), "stop"))
        expected.append(countdown.score(task.task, ids_S, "stop"))
    with Sandbox("rollwire.producers.environments.countdown:Countdown") as sandbox:
        assert sandbox.score(requests) == expected


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00",
        encode_reply(ScoreReply(1, 1.0, (), ""))[4:],
        encode_reply(ScoreReply(0, float("inf"), (), ""))[4:],
        encode_reply(ScoreReply(0, 1.0, (("parses", float("nan")),), ""))[4:],
    ],
)
def test_bad_replies_are_refused(body: bytes) -> None:
    with pytest.raises(BadFrame):
        decode_reply(body, 0)


def test_a_frame_above_the_limit_is_refused_before_it_is_read() -> None:
    reader = FrameReader(limit=1_000)
    reader.feed(b"\xff\xff\xff\xff")
    with pytest.raises(BadFrame):
        reader.next()
