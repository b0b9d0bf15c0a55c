"""`rollwire gateway-keys`, against the store of a stack and a gateway's own view of it."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from contextlib import closing

import pytest

from rollwire.ops.cli import run
from rollwire.ops.stack import StackInfo
from rollwire.ops.stores import stack_store
from rollwire.producers.gateway.access import Caller
from rollwire.producers.gateway.key_store import KeysConfig, StoredKeys
from rollwire.streams.seams.clock import SystemClock


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


@pytest.mark.system
def test_keys_are_made_rotated_and_revoked(stack: StackInfo, capsys: pytest.CaptureFixture[str]) -> None:
    folder = f"keys-{uuid.uuid4().hex}"

    def command(*words: str) -> str:
        assert run(["gateway-keys", *words, "--folder", folder, "--dir", str(stack.dir)]) == 0
        return capsys.readouterr().out

    config = KeysConfig(folder=folder, poll_s=0.2)
    with closing(StoredKeys(stack_store(stack, None, timeout_s=10.0), config, SystemClock())) as access:

        def state(key: str) -> str:
            answer = access.identify(f"Bearer {key}", None)
            return answer.tenant if isinstance(answer, Caller) else answer.code

        first = command("add", "--tenant", "acme", "--rate", "5", "--note", "a shop").strip()
        until(lambda: state(first) == "acme")
        key_id = first.split("_")[1]
        second = command("rotate", key_id, "--overlap", "1h").strip()
        until(lambda: state(second) == "acme")
        assert state(first) == "acme"
        page = "https://app.example.com"
        public = command("add", "--tenant", "acme", "--origin", page, "--expires-in", "90d").strip()
        until(lambda: access.allows_origin(page))
        assert isinstance(access.identify(None, page, public), Caller)
        command("revoke", key_id)
        until(lambda: state(first) == state(second) == "key_revoked")
        listed = command("list")
        assert key_id in listed
        assert "revoked" in listed
        for secret in (first, second, public):
            assert secret.split("_", 2)[2] not in listed


@pytest.mark.system
def test_a_key_that_makes_no_sense_is_one_sentence(
    stack: StackInfo, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--folder", f"keys-{uuid.uuid4().hex}", "--dir", str(stack.dir)]
    assert run(["gateway-keys", "add", "--tenant", "acme", "--origin", "example.com/path", *where]) == 2
    assert "https://host[:port]" in capsys.readouterr().err
    assert run(["gateway-keys", "revoke", "a" * 12, *where]) == 2
    assert "gateway-keys list" in capsys.readouterr().err
