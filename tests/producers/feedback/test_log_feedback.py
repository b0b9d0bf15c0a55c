"""One record, whichever way it came: through a client and the gateway, or straight to the log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any, cast

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollwire.ops.http_server import served
from rollwire.producers.emit import decode_record
from rollwire.producers.feedback import FeedbackClient, FeedbackEvent, LogFeedback, RefusedFeedback
from rollwire.producers.gateway.serve import TOPIC, make_app
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import Refused
from rollwire.schemas.ids import new_group_id, rollout_id
from rollwire.schemas.records import Feedback
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.keys_memory import MemoryKeys
from rollwire.streams.seams.log import TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog

SECRET = b"s" * 32
CLOCK = ManualClock()
GROUPS = [new_group_id(CLOCK.now_us() - 10_000_000, number) for number in range(20)]

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
VALUES = (
    st.none() | st.booleans() | st.sampled_from([0, 1, -1, 0.0, -0.0, 0.5, 1.0000001, 10**30, 250.5, 1e308])
)
EVENTS = st.builds(
    FeedbackEvent,
    st.builds(rollout_id, st.sampled_from(GROUPS), st.integers(0, 3)),
    st.sampled_from(["thumb", "accept", "edit_survival", "rating", "latency_ms", "comment", "thumbs"]),
    VALUES,
    st.none() | st.sampled_from(["up", "accepted", "other"]) | TEXT,
    st.none() | TEXT,
    st.none() | st.just("user-7") | TEXT,
    st.none()
    | st.integers(CLOCK.now_us() - 20_000_000, CLOCK.now_us() + 400_000_000).map(lambda us: us / 1e6),
    st.none() | st.from_regex(r"[A-Za-z0-9._:-]{1,128}", fullmatch=True),
)


class Gate:
    """The gateway on a log of its own, and a client of it."""

    def __init__(self, url: str, log: MemoryLog, keys: MemoryKeys) -> None:
        self.log = log
        self.keys = keys
        self.refused: list[RefusedFeedback] = []
        self.client = FeedbackClient(url, key="rw_test", linger_s=60, on_refused=self.refused.append)


def _log() -> MemoryLog:
    return MemoryLog({name: spec.partitions for name, spec in TOPICS.items()}, CLOCK)


@pytest.fixture(scope="module")
def gate() -> Iterator[Gate]:
    log, keys = _log(), MemoryKeys()
    app = make_app(log, keys, SECRET, clock=CLOCK)
    with served(cast(Any, app), lifespan=True) as at:
        made = Gate(at.url, log, keys)
        with made.client:
            yield made


def _read(log: MemoryLog) -> dict[str, Feedback]:
    partitions = [TopicPartition(TOPIC, number) for number in range(log.partitions(TOPIC))]
    with closing(log.reader()) as reader:
        reader.assign(dict.fromkeys(partitions, 0))
        events: dict[str, Feedback] = {}
        while records := reader.poll(10_000, 0.01):
            for record in records:
                event = decode_record(record)
                assert isinstance(event, Feedback)
                events[event.feedback_id] = event
        return events


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(EVENTS, min_size=1, max_size=12))
def test_the_gateways_record_is_the_sdks_record(gate: Gate, events: list[FeedbackEvent]) -> None:
    ours = _log()
    straight = LogFeedback(ours, gate.keys, SECRET, tenant="default", clock=CLOCK)
    before = set(_read(gate.log))
    refused: dict[str, str] = {}
    at_once: dict[str, str] = {}
    sent: set[str] = set()
    gate.refused.clear()
    for number, event in enumerate(events):
        made = f"{len(before)}-{number}-" + (event.feedback_id or "")[:100]
        # The client's own clock is the machine's: what both are told is the same.
        told = event._replace(feedback_id=made, happened_at=event.happened_at or CLOCK.now_us() / 1e6)
        try:
            straight.send_all([told])
        except Refused as error:
            refused[made] = error.reason
        try:
            gate.client.send(
                told.rollout_id,
                told.signal,
                told.value,
                label=told.label,
                comment=told.comment,
                subject=told.subject,
                happened_at=told.happened_at,
                feedback_id=made,
            )
            sent.add(made)
        except Refused as error:
            at_once[made] = error.reason
    gate.client.flush(60)
    straight.close()
    theirs = {made: event for made, event in _read(gate.log).items() if made not in before}
    same = {made: msgspec.structs.replace(event, dialect="rollwire") for made, event in _read(ours).items()}
    assert theirs == same
    assert at_once | {one.feedback_id: one.code for one in gate.refused} == refused
    assert set(theirs) == sent - set(refused)


def test_where_one_is_refused_none_is_written() -> None:
    log = _log()
    straight = LogFeedback(log, MemoryKeys(), SECRET, tenant="acme", clock=CLOCK)
    good = FeedbackEvent(rollout_id(GROUPS[0], 0), "thumb", 1)
    with pytest.raises(Refused, match="did you mean 'thumb'") as caught:
        straight.send_all([good, good._replace(signal="thumbs")])
    assert (caught.value.reason, caught.value.field) == ("unknown_signal", "signal")
    assert _read(log) == {}
    made = straight.send(*good[:3], subject="someone", comment="nice")
    (event,) = _read(log).values()
    assert (event.feedback_id, event.tenant, event.dialect, event.key_id) == (made, "acme", "sdk", "")
    assert event.seal is not None
    assert event.comment != b"nice"
    straight.close()
