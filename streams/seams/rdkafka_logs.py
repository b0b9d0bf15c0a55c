"""librdkafka's log lines, into structlog: nothing goes to stderr behind our back."""

from __future__ import annotations

import logging
from typing import Any, Final

import structlog

_log = structlog.get_logger("rdkafka")

# A broker that is away is told by our own errors, with the deadline; librdkafka repeats it every second.
_NOISE: Final = ("FAIL", "ERROR", "GETPID", "TERMINATE", "MAXPOLL", "PARTCNT")


class _Bridge(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.WARNING and not text.startswith(_NOISE):
            _log.warning("librdkafka", text=text)
        else:
            _log.debug("librdkafka", text=text)


class ConnectionWatch(logging.Logger):
    """Tells whether a connection of one client has failed, from the client's log: it says so nowhere else.

    Wants the setting `debug=broker`, whose `FAIL` line comes with every failure (the errors and the ordinary log leave
    some out) and which is quiet otherwise: a few lines a transaction, dropped here unread. The lines come with the
    client's `poll`, in their order. A watch is the client's `logger`; each client has its own.
    """

    def __init__(self) -> None:
        super().__init__("rollwire.rdkafka.watched", logging.DEBUG)
        self.failed: str | None = None  # what happened, in librdkafka's words

    def log(self, level: int, msg: object, *args: object, **_: Any) -> None:
        """confluent-kafka calls nothing else: a format, and the line's kind as its first argument."""
        if str(args[0] if args else msg).startswith("FAIL"):
            self.failed = str(msg) % args if args else str(msg)
        if level > logging.DEBUG:
            bridge().log(level, msg, *args)


def bridge() -> logging.Logger:
    """A logger for confluent-kafka's `logger` setting; shared, so that handlers do not pile up."""
    logger = logging.getLogger("rollwire.rdkafka")
    if not logger.handlers:
        logger.addHandler(_Bridge())
        logger.propagate = False
        logger.setLevel(logging.DEBUG)
    return logger
