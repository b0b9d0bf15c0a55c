"""What a client takes, before anything is sent."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwire.producers.feedback.event import MAX_LINE_BYTES, feedback_line
from rollwire.schemas.errors import Refused
from rollwire.schemas.ids import is_group_id, new_group_id

NOW_US = 1_767_225_600_123_456  # 2026-01-01
ROLLOUT = new_group_id(NOW_US, 1) + ".0"


def _line(**given_: Any) -> tuple[str, dict[str, Any]]:
    said: dict[str, Any] = {
        "rollout_id": ROLLOUT,
        "signal": "thumb",
        "value": 1,
        "label": None,
        "comment": None,
        "subject": None,
        "happened_at": None,
        "feedback_id": None,
        "now_us": NOW_US,
        "random_bits": 5,
    } | given_
    made, line = feedback_line(said.pop("rollout_id"), said.pop("signal"), said.pop("value"), **said)
    assert b"\n" not in line
    event: dict[str, Any] = json.loads(line)
    return made, event


def test_an_event_is_complete_when_it_is_taken() -> None:
    made, event = _line()
    assert event == {
        "feedback_id": made,
        "rollout_id": ROLLOUT,
        "signal": "thumb",
        "value": 1,
        "happened_at": "2026-01-01T00:00:00.123456Z",
    }
    assert is_group_id(made), "a UUIDv7: unique without asking anybody, and in order of time"
    assert _line(feedback_id="click:17")[0] == "click:17"


@pytest.mark.parametrize(
    ("when", "text"),
    [
        (datetime(2026, 1, 1, 12, 0, tzinfo=timezone(timedelta(hours=2))), "2026-01-01T10:00:00.000000Z"),
        (datetime(2026, 1, 1, 12, 0, 0, 7, tzinfo=UTC), "2026-01-01T12:00:00.000007Z"),
        (1_767_225_600, "2026-01-01T00:00:00.000000Z"),
        (1_767_225_600.5, "2026-01-01T00:00:00.500000Z"),
    ],
)
def test_a_time_is_said_in_utc(when: datetime | float, text: str) -> None:
    assert _line(happened_at=when)[1]["happened_at"] == text


@pytest.mark.parametrize(
    ("given_", "reason", "said"),
    [
        ({"rollout_id": "answer-7"}, "id_invalid", "rollout id"),
        ({"rollout_id": None}, "malformed", "rollout_id"),
        ({"signal": ""}, "malformed", "signal is empty"),
        ({"signal": 3}, "malformed", "signal"),
        ({"value": None}, "malformed", "says nothing"),
        ({"value": float("nan")}, "not_finite", "nan"),
        ({"value": float("-inf")}, "not_finite", "inf"),
        ({"value": "1"}, "malformed", "str"),
        ({"feedback_id": ""}, "id_invalid", "feedback_id"),
        ({"feedback_id": "a b"}, "id_invalid", "feedback_id"),
        ({"feedback_id": "x" * 129}, "id_invalid", "feedback_id"),
        ({"feedback_id": 17}, "malformed", "feedback_id"),
        ({"happened_at": datetime(2026, 1, 1)}, "time_invalid", "no time zone"),
        ({"happened_at": 1_767_225_600_000}, "time_invalid", "seconds"),
        ({"happened_at": True}, "time_invalid", "seconds"),
        ({"happened_at": float("nan")}, "time_invalid", "nan"),
        ({"comment": "good"}, "malformed", "subject"),
        ({"comment": "x" * MAX_LINE_BYTES, "subject": "u"}, "too_large", "shorten"),
    ],
)
def test_a_mistake_shows_where_it_is_made(given_: dict[str, Any], reason: str, said: str) -> None:
    with pytest.raises(Refused, match=said) as caught:
        _line(**given_)
    assert caught.value.reason == reason


def test_c74_half_a_character_is_refused_and_a_whole_one_unchanged() -> None:
    with pytest.raises(Refused, match="lone surrogate"):
        _line(comment="\ud83d", subject="u")
    family = "👩‍👩‍👧‍👦 gut\r\n\u2028\ufffd"
    assert _line(comment=family, subject="u")[1]["comment"] == family


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200))
def test_any_text_comes_out_as_it_went_in(text: str) -> None:
    _, event = _line(comment=text, subject=text)
    assert (event["comment"], event["subject"]) == (text, text)


def test_the_import_brings_nothing_heavy() -> None:
    program = (
        "import sys; import rollwire.producers.feedback\n"
        "heavy = {'torch', 'numpy', 'numba', 'matplotlib', 'pydantic', 'httpx', 'asyncio', 'fastavro', 'confluent_kafka'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
