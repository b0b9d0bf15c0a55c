"""`rollwire feedback send | flush`: user feedback from a shell."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import App, Parameter

from rollwire.producers.feedback import FeedbackClient, RefusedFeedback
from rollwire.schemas.errors import ConfigError, Refused, SpoolFull

app = App(name="feedback", help="Send user feedback to a gateway.", help_format="markdown")

Url = Annotated[
    str,
    Parameter(name="--url", env_var="ROLLWIRE_FEEDBACK_URL", help="The gateway's address."),
]
Key = Annotated[
    str | None,
    Parameter(
        name="--key",
        env_var="ROLLWIRE_FEEDBACK_KEY",
        show_default=False,
        help="API key; one in the environment is not seen by others on this machine.",
    ),
]
Timeout = Annotated[
    float, Parameter(name="--timeout", help="Seconds to wait for the gateway's word on everything.")
]
_HERE: Final = "http://127.0.0.1:8300"
_FIELDS: Final = frozenset(
    {"rollout_id", "signal", "value", "label", "comment", "subject", "happened_at", "feedback_id"}
)


@app.command
def send(
    rollout_id: str | None = None,
    signal: str | None = None,
    value: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    /,
    *,
    label: str | None = None,
    comment: str | None = None,
    subject: str | None = None,
    happened_at: datetime | None = None,
    id: str | None = None,
    lines: Path | None = None,
    spool: Path | None = None,
    url: Url = _HERE,
    key: Key = None,
    timeout: Timeout = 30.0,
) -> int:
    """Send one piece of feedback, or many, and wait until the gateway has them. Prints their ids.

    `rollwire feedback send 0199a0b2-7c31-7abc-8def-0123456789ab.0 thumb 1`. Ends with 1 where one was refused; sending the same id again is
    harmless.

    Parameters
    ----------
    rollout_id
        The answer that it is about, as the serving side gave it.
    signal
        thumb, accept, edit_survival, rating, comment, ...: one of the gateway's rules.
    value
        A number, or true or false.
    label
        A word instead of a value.
    comment
        Free text; it needs --subject, with whose key it is encrypted.
    subject
        The person, by an id of yours.
    happened_at
        When it happened, with its zone (2026-01-31T12:00:00Z); by default now.
    id
        The idempotency key; by default a new one. Sent twice, it needs the same --happened-at.
    lines
        A file of JSON lines with these fields, instead of one event; - is standard input. Lines with a feedback_id and
        happened_at may be sent again.
    spool
        Folder in which it waits where the gateway is away, for the next `send` or `flush`.
    """
    events = _lines(lines) if lines is not None else iter([(0, _one(rollout_id, signal, value))])
    more = {
        "label": label,
        "comment": comment,
        "subject": subject,
        "happened_at": happened_at,
        "feedback_id": id,
    }
    refused: list[RefusedFeedback] = []
    with FeedbackClient(url, key=key, spool=spool, on_refused=refused.append) as client:
        for number, event in events:
            given = event if lines is not None else event | more
            try:
                made = _send(client, given, timeout)
            except Refused as error:
                if lines is None:
                    raise
                raise Refused(error.reason, f"line {number}: {error.detail}", error.field) from None
            sys.stdout.write(made + "\n")
        client.flush(timeout)
        return _end(client, refused)


def _send(client: FeedbackClient, event: dict[str, Any], timeout_s: float) -> str:
    try:
        return client.send(**event)
    except SpoolFull:  # a long file: it is read no faster than the gateway takes it
        client.flush(timeout_s)
        return client.send(**event)


@app.command
def flush(*, spool: Path, url: Url = _HERE, key: Key = None, timeout: Timeout = 300.0) -> int:
    """Send what ended processes left in a spool.

    Parameters
    ----------
    spool
        The folder.
    """
    if not spool.is_dir():
        raise ConfigError(f"there is no spool {spool}")
    refused: list[RefusedFeedback] = []
    with FeedbackClient(url, key=key, spool=spool, on_refused=refused.append) as client:
        client.flush(timeout)
        return _end(client, refused)


def _end(client: FeedbackClient, refused: list[RefusedFeedback]) -> int:
    counts = client.counts()
    for one in refused:
        where = f" in {one.field}" if one.field else ""
        sys.stderr.write(f"refused {one.feedback_id}: {one.code}{where}: {one.detail}\n")
    known = f", {counts.repeated} of them known already" if counts.repeated else ""
    sys.stderr.write(f"{counts.accepted} accepted{known}, {counts.refused} refused\n")
    return 1 if refused or counts.damaged else 0


def _one(rollout_id: str | None, signal: str | None, value: str | None) -> dict[str, Any]:
    if rollout_id is None or signal is None:
        raise ConfigError(
            "say which answer and what: `rollwire feedback send ROLLOUT-ID SIGNAL VALUE`, or --lines FILE"
        )
    return {"rollout_id": rollout_id, "signal": signal, "value": _value(value)}


def _value(text: str | None) -> bool | int | float | None:
    if text is None:
        return None
    try:
        value = json.loads(text.strip())
    except ValueError:
        value = None
    if not isinstance(value, bool | int | float):
        raise ConfigError(f"value {text!r} is no number, and not true or false; a word is --label")
    return value


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The events of a file with their line numbers, each checked for its fields. Raises `ConfigError` with the line."""
    try:
        with sys.stdin if str(path) == "-" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _event(line, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _event(line: str, where: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: no JSON: {error}") from None
    if not isinstance(event, dict):
        raise ConfigError(f"{where}: no JSON object")
    if unknown := set(event) - _FIELDS:
        raise ConfigError(f"{where}: unknown field {min(unknown)!r}; known are {', '.join(sorted(_FIELDS))}")
    if missing := {"rollout_id", "signal"} - set(event):
        raise ConfigError(f"{where}: without {min(missing)}")
    if isinstance(event.get("happened_at"), str):
        try:
            event["happened_at"] = datetime.fromisoformat(event["happened_at"])
        except ValueError:
            raise ConfigError(f"{where}: happened_at is no time: {event['happened_at']!r}") from None
    return event
