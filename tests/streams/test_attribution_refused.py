"""A record whose caller was told no has no effect, whatever rollout it names (C70)."""

from __future__ import annotations

import time

import pytest

from rollwire.producers.gateway.encode import Encoder
from rollwire.producers.gateway.judge import Draft
from rollwire.producers.gateway.records import CONFLICT
from rollwire.schemas.errors import Refused
from rollwire.schemas.ids import new_group_id
from rollwire.schemas.records import Feedback
from rollwire.streams.attribution.intake import opened
from rollwire.streams.seams.log import Outgoing


@pytest.fixture
def record() -> Outgoing:
    """As a gateway writes it."""
    now_us = time.time_ns() // 1_000
    group = new_group_id(now_us, 1)
    encoder = Encoder("acme", "", "rollwire")
    encoder.received(now_us)
    return encoder.record(
        Draft("f1", "client", group, f"{group}.0", "thumb", 1.0, None, now_us, "", None, b"d" * 16)
    )


def test_c70_what_the_gateway_answered_409_is_refused_with_its_reason(record: Outgoing) -> None:
    assert isinstance(opened(record.topic, record.value, record.headers, record.key), Feedback)
    with pytest.raises(Refused) as refused:
        opened(record.topic, record.value, (*record.headers, CONFLICT), record.key)
    assert refused.value.reason == "conflicting_repeat"


@pytest.mark.parametrize("value", [None, b"", b"because", b"\xff"])
def test_a_header_of_somebody_else_refuses_nothing(record: Outgoing, value: bytes | None) -> None:
    headers = (*record.headers, ("refused", value))
    assert isinstance(opened(record.topic, record.value, headers, record.key), Feedback)
