"""How a process of ours is told to stop, and that it does: within 10 s, whatever it waits for (law 8).

Python runs a signal's handler in the main thread and between two of its instructions only: a thread that waits inside a
client library (for a broker that stands still, say) would not hear of it. So the signal's byte is read by a thread of its
own, which sets the event at once and ends the process when the rest has not ended by itself in time. That is safe at any
moment: it is a kill -9 that left a word. What was not committed is read again by whoever comes next.
"""

from __future__ import annotations

import faulthandler
import signal
import socket
import sys
import threading
from typing import Final

STOP_S: Final = 9.0  # of the 10 s: the rest is the interpreter's
LATE: Final = 1  # exit code of a process that had to be cut off


def stop_on_signals(stop: threading.Event, deadline_s: float = STOP_S) -> None:
    """SIGTERM and SIGINT set `stop`; `deadline_s` later the process ends, where it has not by then.

    For the main thread, once in a process. The stacks of what did not end go to standard error, under the word "Timeout".
    """
    ends = socket.socketpair()  # the thread below holds both: a second signal is written as well
    ends[1].setblocking(False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # the thread sets it, once the end is counted
    signal.set_wakeup_fd(ends[1].fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        ends[0].recv(1)
        # Counted by a thread that needs no interpreter: one that is being taken down may wait in a client's destructor.
        faulthandler.dump_traceback_later(deadline_s, exit=True, file=sys.stderr)
        stop.set()

    threading.Thread(target=watch, name="stop-watch", daemon=True).start()
