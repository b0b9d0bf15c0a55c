"""The twin's markers: a decided transaction reaches topics and group offsets one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rollwire.schemas.errors import Fenced, LogError, LogUnavailable
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.log import Outgoing, TopicPartition
from rollwire.streams.seams.log_memory import Marker, MemoryLog
from rollwire.streams.seams.log_memory_write import Transaction
from rollwire.streams.seams.scan import scan

A, B = TopicPartition("a", 0), TopicPartition("b", 0)
IN = TopicPartition("in", 0)


class PatientLog(MemoryLog):
    """Waits for no marker: it notes what was waited for, and gives up."""

    waited: tuple[Marker, ...] = ()

    def await_markers(self, markers: Sequence[Marker], timeout_s: float) -> None:
        if markers:
            self.waited = tuple(markers)
            raise LogUnavailable(f"not after {timeout_s} s")


def held(kind: type[MemoryLog] = MemoryLog) -> MemoryLog:
    return kind({"a": 1, "b": 1, "in": 1}, ManualClock(), hold_markers=True)


def put(log: MemoryLog, transactional_id: str = "t", *, group: str = "g", offset: int = 5) -> None:
    writer = log.transactional_writer(transactional_id)
    writer.begin()
    writer.write([Outgoing("a", None, b"1"), Outgoing("b", None, b"2")])
    writer.commit(group, {IN: offset}, also={f"{group}.read": {IN: offset + 1}})


def read(log: MemoryLog, topic: str) -> list[bytes | None]:
    return [record.value for record in scan(log, [topic], clock=ManualClock())]


def test_a_decided_transaction_becomes_visible_place_by_place() -> None:
    log = held()
    put(log)
    log.writer().write([Outgoing("b", None, b"after")])
    assert [marker.place for marker in log.markers()] == [A, B, "g", "g.read"]
    assert log.end_offsets([A, B]) == {A: 0, B: 0}
    log.deliver(log.markers()[0])
    assert (read(log, "a"), read(log, "b")) == ([b"1"], [])
    log.deliver(log.markers()[0])
    assert read(log, "b") == [b"2", b"after"]
    assert log.end_offsets([B]) == {B: 3}  # the marker came behind the other record
    assert [marker.place for marker in log.markers()] == ["g", "g.read"]
    for marker in log.markers():
        log.deliver(marker)
    assert (log.transactions(), log.committed("g.read", [IN])) == ([], {IN: 6})


def test_offsets_are_waited_for_until_their_marker_has_come() -> None:
    log = held(PatientLog)
    assert isinstance(log, PatientLog)
    put(log)
    with pytest.raises(LogUnavailable):
        log.committed("g", [IN])
    assert [marker.place for marker in log.waited] == ["g"]
    assert log.committed("g", [A]) == {}  # other partitions of the group are stable
    log.deliver(log.waited[0])
    assert log.committed("g", [IN]) == {IN: 5}


def test_offsets_of_an_undecided_transaction_are_not_told() -> None:
    log = held()
    writer = log.take_over("t", 1.0)
    writer.begin()
    writer.send_offsets({"g": {IN: 5}}, 1.0)
    with pytest.raises(LogError):
        log.committed("g", [IN])
    log.transactional_writer("t")
    assert log.committed("g", [IN]) == {}


def test_a_take_over_waits_for_every_marker_of_its_id_and_no_other() -> None:
    log = held(PatientLog)
    assert isinstance(log, PatientLog)
    put(log)
    put(log, "other", group="h")
    with pytest.raises(LogUnavailable):
        log.transactional_writer("t")
    assert [marker.place for marker in log.waited] == [A, B, "g", "g.read"]
    assert {marker.transaction.transactional_id for marker in log.waited} == {"t"}


def test_the_next_transaction_of_a_writer_waits_for_the_markers_of_the_last() -> None:
    log = held()
    writer = log.transactional_writer("t")
    for _ in range(2):
        writer.begin()
        assert len(log.markers()) in (0, 1)
        writer.write([Outgoing("a", None, b"1")])
        assert log.markers() == []
        writer.commit("g", {})
    assert len(log.markers()) == 1


def test_an_aborted_transaction_is_hidden_until_its_marker_and_gone_after_it() -> None:
    log = held()
    writer = log.transactional_writer("t")
    writer.begin()
    writer.write([Outgoing("a", None, b"no")])
    writer.abort()
    log.writer().write([Outgoing("a", None, b"yes")])
    assert read(log, "a") == []
    log.deliver(log.markers()[0])
    assert read(log, "a") == [b"yes"]


def test_a_transaction_that_timed_out_is_aborted_and_its_owner_fenced() -> None:
    log = held()
    writer = log.transactional_writer("t")
    writer.begin()
    writer.write([Outgoing("a", None, b"no")])
    log.time_out(log.transactions()[0])
    with pytest.raises(Fenced):
        writer.commit("g", {IN: 1})
    for marker in log.markers():
        log.deliver(marker)
    assert (read(log, "a"), log.committed("g", [IN])) == ([], {})
    with pytest.raises(LogError, match="no marker"):
        log.deliver(Marker(log_transaction(log), A))


def log_transaction(log: MemoryLog) -> Transaction:
    put(log)
    marker = log.markers()[0]
    log.deliver(marker)
    return marker.transaction
