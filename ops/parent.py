"""A process that a demo or a chaos run started must not outlive it: it would hold its transactional id and confuse the next."""

from __future__ import annotations

import os
import signal
import threading

from rollwire.ops.demo.supervisor import PARENT


def stop_with_parent(stop: threading.Event) -> None:
    """Sets `stop` and sends SIGTERM to itself when the process that started it is gone; nothing where none is named."""
    parent = os.environ.get(PARENT)
    if parent is None:
        return
    poll = threading.Event()

    def watch() -> None:
        while os.getppid() == int(parent):
            poll.wait(1.0)
        stop.set()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
