"""A feedback event's own fields."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rollwire.schemas.errors import Refused
from rollwire.schemas.golden import load_examples
from rollwire.schemas.records import Feedback
from rollwire.schemas.validate import validate


def example(name: str) -> Feedback:
    found = next(e.event for e in load_examples("user-feedback") if e.name == name)
    assert isinstance(found, Feedback)
    return found


@pytest.mark.parametrize(
    ("name", "change", "reason", "field"),
    [
        ("thumb", {"feedback_id": ""}, "id_invalid", "feedback_id"),
        ("thumb", {"feedback_id": "a/b"}, "id_invalid", "feedback_id"),
        ("thumb", {"feedback_id": "a" * 129}, "id_invalid", "feedback_id"),
        ("thumb", {"tenant": ""}, "id_invalid", "tenant"),
        ("thumb", {"tenant": "a/b"}, "id_invalid", "tenant"),
        ("thumb", {"signal": "Thumb!"}, "id_invalid", "signal"),
        ("thumb", {"value": None}, "inconsistent", "value"),
        ("thumb", {"value": float("nan")}, "not_finite", ""),
        ("thumb", {"label": "x" * 257}, "limit_exceeded", "label"),
        ("thumb", {"subject": "alice@example.org"}, "id_invalid", "subject"),
        ("thumb", {"comment": b"plain"}, "seal_invalid", "comment"),
        ("thumb", {"rollout_id": "019b76da-a800-7055-9555-555555555556.0"}, "id_invalid", ""),
        ("thumb", {"happened_us": 1_767_225_601}, "time_invalid", ""),
        ("thumb", {"received_us": 1_767_225_601_000}, "time_invalid", ""),
        ("sealed-comment", {"seal": None}, "seal_invalid", "comment"),
        ("sealed-comment", {"subject": "0" * 32}, "seal_invalid", "subject"),
        ("sealed-comment", {"comment": bytes(64 * 1024 + 1)}, "limit_exceeded", "comment"),
    ],
)
def test_what_is_wrong_is_refused(name: str, change: dict[str, Any], reason: str, field: str) -> None:
    good = example(name)
    validate(good)
    with pytest.raises(Refused) as caught:
        validate(msgspec.structs.replace(good, **change))
    assert (caught.value.reason, caught.value.field) == (reason, field)
