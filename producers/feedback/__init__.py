"""Sending what people thought of an answer: a client of the gateway, sync and async, and one that writes to the log.

    from rollwire.producers.feedback import FeedbackClient

    with FeedbackClient("https://feedback.example.com", key="rw_...", spool="/var/lib/app/feedback") as feedback:
        feedback.send(rollout_id, "thumb", 1)

`FeedbackClient` never waits for the network in `send`; a spool makes what waits survive the process. `AsyncFeedbackClient` is the
same for asyncio. `LogFeedback` writes straight to the log, the record that the gateway would write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollwire.producers.feedback.client import FeedbackClient
from rollwire.producers.feedback.courier import RefusedFeedback
from rollwire.producers.feedback.delivery import FeedbackCounts

if TYPE_CHECKING:
    from rollwire.producers.feedback.async_client import AsyncFeedbackClient
    from rollwire.producers.feedback.log_feedback import FeedbackEvent, LogFeedback

__all__ = [
    "AsyncFeedbackClient",
    "FeedbackClient",
    "FeedbackCounts",
    "FeedbackEvent",
    "LogFeedback",
    "RefusedFeedback",
]


def __getattr__(name: str) -> Any:
    # asyncio takes longer to import than all of this, the codec (numpy, fastavro) longer still: only who uses them pays.
    if name == "AsyncFeedbackClient":
        from rollwire.producers.feedback.async_client import AsyncFeedbackClient

        return AsyncFeedbackClient
    if name in ("LogFeedback", "FeedbackEvent"):
        from rollwire.producers.feedback import log_feedback

        return getattr(log_feedback, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
