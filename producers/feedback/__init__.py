"""Sending what people thought of an answer: a client of the gateway, sync and async.

    from rollwire.producers.feedback import FeedbackClient

    with FeedbackClient("https://feedback.example.com", key="rw_...", spool="/var/lib/app/feedback") as feedback:
        feedback.send(rollout_id, "thumb", 1)

`FeedbackClient` never waits for the network in `send`; a spool makes what waits survive the process. `AsyncFeedbackClient` is the
same for asyncio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollwire.producers.feedback.client import FeedbackClient
from rollwire.producers.feedback.courier import RefusedFeedback
from rollwire.producers.feedback.delivery import FeedbackCounts

if TYPE_CHECKING:
    from rollwire.producers.feedback.async_client import AsyncFeedbackClient

__all__ = ["AsyncFeedbackClient", "FeedbackClient", "FeedbackCounts", "RefusedFeedback"]


def __getattr__(name: str) -> Any:
    # asyncio takes longer to import than all of this: only who uses it pays.
    if name == "AsyncFeedbackClient":
        from rollwire.producers.feedback.async_client import AsyncFeedbackClient

        return AsyncFeedbackClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
