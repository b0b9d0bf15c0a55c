"""Feedback straight to the log, for who is beside the broker: the record that the gateway would write, judged by the same code."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, NamedTuple

from rollwire.producers.emit import outgoing
from rollwire.producers.feedback.event import Value, When, feedback_line
from rollwire.producers.gateway.access import Refusal
from rollwire.producers.gateway.config import GatewayConfig
from rollwire.producers.gateway.item import parse_one
from rollwire.producers.gateway.judge import Context, judge
from rollwire.producers.gateway.records import feedback_of, seal_comment
from rollwire.schemas.errors import Refused
from rollwire.schemas.pseudonyms import pseudonym_of
from rollwire.schemas.rules import Rules, default_rules
from rollwire.streams.seams.clock import Clock, SystemClock
from rollwire.streams.seams.keys import KeyStore
from rollwire.streams.seams.log import Log, Outgoing

SOURCE: Final = "rollwire/feedback"
_REMEMBERED: Final = 65_536
_LIMITS: Final = GatewayConfig()  # type: ignore[call-arg,unused-ignore]


class FeedbackEvent(NamedTuple):
    """One piece of feedback; the fields are the arguments of `send`."""

    rollout_id: str
    signal: str
    value: Value | None = None
    label: str | None = None
    comment: str | None = None
    subject: str | None = None
    happened_at: When | None = None
    feedback_id: str | None = None


class LogFeedback:
    """Writes feedback to `user-feedback`. Thread-safe.

        feedback = LogFeedback(log, keys, secret, tenant="acme")
        feedback.send(rollout_id, "thumb", 1)  # returns when it is durable

    No API key, no quota, no look at what was sent before: the stream removes repeats, so a `send` that failed may be repeated
    under its `feedback_id`.

    Parameters
    ----------
    log
        The log, as `KafkaLog("host:port")`.
    keys
        The key store of persons: comments are sealed by it.
    secret
        What pseudonyms are made with, 32 bytes (`MasterKey.pseudonym_secret`): the gateway's, or the same person is two.
    tenant
        Whose feedback it is.
    rules
        What signals may say; by default the built-in ones. They should be the gateway's.
    """

    def __init__(
        self,
        log: Log,
        keys: KeyStore,
        secret: bytes,
        *,
        tenant: str,
        rules: Rules | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._writer = log.writer()
        self._keys = keys
        self._rules = rules or default_rules()
        self._clock = clock or SystemClock()

        @lru_cache(maxsize=_REMEMBERED)
        def pseudonym(tenant: str, subject: str) -> str:
            return pseudonym_of(secret, tenant, subject)

        self._context = Context(
            tenant, "", "sdk", secret, pseudonym, _LIMITS.max_comment_bytes, round(_LIMITS.max_skew_s * 1e6)
        )

    def send(
        self,
        rollout_id: str,
        signal: str,
        value: Value | None = None,
        *,
        label: str | None = None,
        comment: str | None = None,
        subject: str | None = None,
        happened_at: When | None = None,
        feedback_id: str | None = None,
        timeout_s: float = 30.0,
    ) -> str:
        """Writes one piece of feedback and gives its id once the log has it. The arguments are `FeedbackClient.send`'s.

        Raises `Refused` as the gateway would, `LogUnavailable` where the broker did not acknowledge in time (it may be there:
        send it again under the same id), and what the key store raises.
        """
        event = FeedbackEvent(rollout_id, signal, value, label, comment, subject, happened_at, feedback_id)
        return self.send_all([event], timeout_s)[0]

    def send_all(self, events: Iterable[FeedbackEvent], timeout_s: float = 30.0) -> list[str]:
        """Writes many at once and gives their ids in order. All are judged first: where one is refused, none is written."""
        ids, records = [], []
        for event in events:
            feedback_id, record = self.record(event)
            ids.append(feedback_id)
            records.append(record)
        self._writer.write(records, timeout_s)
        return ids

    def record(self, event: FeedbackEvent) -> tuple[str, Outgoing]:
        """(feedback id, the record to write). Raises `Refused`."""
        now_us = self._clock.now_us()
        feedback_id, line = feedback_line(
            event.rollout_id,
            event.signal,
            event.value,
            label=event.label,
            comment=event.comment,
            subject=event.subject,
            happened_at=event.happened_at,
            feedback_id=event.feedback_id,
            now_us=now_us,
            random_bits=int.from_bytes(os.urandom(10), "big"),
        )
        # By the gateway's own parser and judge: there is one opinion on what an event is.
        parsed = parse_one(line)
        draft = parsed if isinstance(parsed, Refusal) else judge(parsed, self._context, self._rules, now_us)
        if isinstance(draft, Refusal):
            raise Refused(draft.code, draft.detail, draft.field)
        sealed = None if draft.comment is None else seal_comment(draft, self._keys.data_key(draft.subject))
        feedback = feedback_of(draft, self._context, now_us, sealed)
        return feedback_id, outgoing(feedback, source=SOURCE, time_us=now_us)

    def close(self) -> None:
        self._writer.close()
