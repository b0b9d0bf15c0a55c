"""A record whose caller was told no has no effect, whatever rollout it names (C70)."""

from __future__ import annotations

import pytest

from rollwire.producers.gateway.records import CONFLICT
from rollwire.schemas.errors import Refused
from rollwire.streams.attribution.faust_app import refuse_told

ORDINARY: tuple[tuple[str, bytes | None], ...] = (
    ("ce_id", b"acme/f1"),
    ("content-type", b"application/avro"),
)


def test_c70_what_the_gateway_answered_409_is_refused_with_its_reason() -> None:
    with pytest.raises(Refused) as refused:
        refuse_told((*ORDINARY, CONFLICT))
    assert refused.value.reason == "conflicting_repeat"


@pytest.mark.parametrize("value", [None, b"", b"because", b"\xff"])
def test_a_header_of_somebody_else_refuses_nothing(value: bytes | None) -> None:
    refuse_told(ORDINARY)
    refuse_told((*ORDINARY, ("refused", value)))
