"""librdkafka's log lines, into structlog: nothing goes to stderr behind our back."""

from __future__ import annotations

import logging
from typing import Final

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


def bridge() -> logging.Logger:
    """A logger for confluent-kafka's `logger` setting; shared, so that handlers do not pile up."""
    logger = logging.getLogger("rollwire.rdkafka")
    if not logger.handlers:
        logger.addHandler(_Bridge())
        logger.propagate = False
        logger.setLevel(logging.DEBUG)
    return logger
