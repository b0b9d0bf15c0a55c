"""A process is told to stop at once and ends in time, whatever its main thread waits for (law 8)."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from rollwire.ops.stopping import LATE

# The main thread is held inside a C library, as a client that waits for a broker holds it: no handler of Python's runs.
PROGRAM = """
import ctypes, os, sys, threading
from rollwire.ops.stopping import stop_on_signals
stop = threading.Event()
stop_on_signals(stop, 1.0)
def answer():
    stop.wait()
    print("heard", flush=True)
    if sys.argv[1] == "ends":
        os._exit(0)
print("ready", flush=True)
if sys.argv[1] in ("well", "hangs at its end"):
    stop.wait()
    print("heard", flush=True)
    class Client:
        def __del__(self):
            ctypes.PyDLL(None).sleep(20)  # the interpreter is being taken down, and its lock is held
    client = Client() if sys.argv[1] == "hangs at its end" else None
    sys.exit(0)
threading.Thread(target=answer, daemon=True).start()
mutex = ctypes.create_string_buffer(64)
ctypes.CDLL(None).pthread_mutex_lock(mutex)
ctypes.CDLL(None).pthread_mutex_lock(mutex)  # for ever, and no signal interrupts it
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("manner", "code"), [("well", 0), ("ends", 0), ("hangs", LATE), ("hangs at its end", LATE)]
)
def test_a_stop_is_heard_at_once_and_has_an_end(number: signal.Signals, manner: str, code: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM, manner],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            told = time.monotonic()
            process.send_signal(number)
            assert process.stdout.readline() == "heard\n"
            _, errors = process.communicate(timeout=20.0)
        finally:
            process.kill()
    assert process.returncode == code
    assert time.monotonic() - told < 10.0
    assert ("Timeout" in errors) == manner.startswith("hangs")
    # What it hung in is told, for whoever is to mend it.
    assert ("File" in errors) == manner.startswith("hangs")
