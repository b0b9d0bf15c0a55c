"""The account by hour, over whole histories of the simulation: it adds up, and what is planted is named by event id and place."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import tracemalloc
from collections import Counter
from contextlib import closing
from typing import Final

import msgspec
import pytest

from rollwire.consumers.audit.hours import HOUR_MS, HourLedger, chosen, hour_name, hour_of
from rollwire.consumers.audit.hours_book import Book
from rollwire.consumers.audit.hours_count import Counted, count_hours
from rollwire.consumers.audit.hours_report import digest_of, make_report
from rollwire.ops.bench.feedback.bare import records
from rollwire.ops.bench.feedback.bodies import Bodies
from rollwire.ops.bench.streams_load import record_of
from rollwire.ops.simulate.run import Simulation
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import Refused, TopicMismatch
from rollwire.schemas.framing import MARKER
from rollwire.schemas.ids import new_group_id
from rollwire.schemas.records import DeadLetter, GroupFate
from rollwire.streams import synthetic
from rollwire.streams.archive.archiver import archive_sealed
from rollwire.streams.archive.heads import LocalSigner, new_signing_key
from rollwire.streams.archive.log import ArchivedLog
from rollwire.streams.archive.sealed import sealed
from rollwire.streams.archive.sealer import seal_epoch
from rollwire.streams.dead_letter import dead_letter
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.findings import Kind
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.log import Outgoing, Record, TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.store_memory import MemoryStore

SEEDS: Final = (1, 2, 3, 5)  # 2 and 5 with production rollouts
BASE_MS: Final = 1_767_225_600_000  # 2026-01-01T00:00Z
LATER_US: Final = (BASE_MS + 48 * HOUR_MS) * 1_000
MINUTES: Final = 7  # between two records of a partition


def history(seed: int) -> MemoryLog:
    """A simulated run at its rest, its records spread over hours."""
    simulation = Simulation(seed)
    simulation.run()
    log: MemoryLog = simulation.log
    for place, at in log._partitions.items():
        for number, record in enumerate(at.entries):
            if record is not None:
                stamp = BASE_MS + number * MINUTES * 60_000 + place.partition
                at.entries[number] = record._replace(timestamp_ms=stamp)
    return log


def entries(log: MemoryLog, topic: str) -> list[Record]:
    return [r for p, at in log._partitions.items() if p.topic == topic for r in at.entries if r is not None]


def lose(log: MemoryLog, record: Record) -> None:
    at = log._partitions[TopicPartition(record.topic, record.partition)]
    at.entries[record.offset - at.begin] = None


def counted(log: MemoryLog | ArchivedLog, now_ms: int | None = None) -> Counted:
    clock = None if now_ms is None else ManualClock(now_ms * 1_000)
    return count_hours(log, "", settle_s=0.0, patchy=True, clock=clock)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_topic_hour_and_flow_adds_up(seed: int) -> None:
    log = history(seed)
    ledger = counted(log).ledger
    assert ledger.differences == ()
    assert ledger.exact
    received = Counter(
        {
            (topic, hour_name(hour_of(r.timestamp_ms))): 0
            for topic in {p.topic for p in log._partitions}
            for r in entries(log, topic)
        }
    )
    received.update(
        (topic, hour_name(hour_of(r.timestamp_ms)))
        for topic in {p.topic for p in log._partitions}
        for r in entries(log, topic)
    )
    assert {(line.topic, line.hour): line.received for line in ledger.lines} == received
    assert len({line.hour for line in ledger.lines}) > 2
    assert set(ledger.gaps().values()) == {0}
    for flow in {one.flow for one in ledger.flows}:
        still = 0
        for hour in (one for one in ledger.flows if one.flow == flow):
            still += hour.started - hour.closed
            assert hour.open == still >= 0


CLOSED: Final = ("groups-closed", "production-groups-closed")
LOSSES: Final = (
    # What is lost, and the topics in which that shows.
    ("rollouts", {"groups", "group-fates"}),
    ("groups", {*CLOSED, "group-fates", "rollouts", "production-rollouts", "rewards", "routing-traces"}),
    ("group-fates", {*CLOSED, "groups", "rollouts", "production-rollouts", "rewards", "routing-traces"}),
    ("train-steps", {"packed-batches", "weight-versions"}),
    ("weight-versions", {"train-steps", "weight-versions", "packed-batches"}),
)


@pytest.mark.parametrize(("topic", "shows"), LOSSES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_record_that_is_lost_is_named(seed: int, topic: str, shows: set[str]) -> None:
    log = history(seed)
    ids = Counter(map(_id, entries(log, topic)))
    letters = {_source(r) for r in entries(log, "dead-letters")}
    # One that went on: of what stands there twice or was refused, another record speaks.
    some = [
        r
        for r in entries(log, topic)
        if ids[_id(r)] == 1 and (topic, r.partition, r.offset) not in letters and _id(r) and _shows(log, r)
    ]
    lost = random.Random(seed).choice(some)
    lose(log, lost)
    counted_ = counted(log)
    ledger = counted_.ledger
    assert not ledger.exact
    assert ledger.differences
    assert {one.topic for one in ledger.differences} <= shows | {topic}
    if topic in ("rollouts", "groups", "group-fates"):
        group_id = (lost.key or b"").decode()
        assert all(group_id in f"{one.event_id} {one.detail}" for one in ledger.differences)
    report = make_report(counted_, ledger)
    assert report.exit_code == 1
    assert report.results["ledger.gap"] == ledger.gap == sum(report.gaps.values())
    for one in ledger.differences:
        if one.offset is not None and one.partition is not None:
            there = log._partitions[TopicPartition(one.topic, one.partition)]
            record = there.entries[one.offset - there.begin]
            assert record is not None
            assert one.hour == hour_name(hour_of(record.timestamp_ms))
    named = [
        (f.position.topic, f.position.partition, f.position.offset) for f in report.findings if f.position
    ]
    assert named == [(d.topic, d.partition, d.offset) for d in ledger.differences if d.offset is not None]


def _shows(log: MemoryLog, record: Record) -> bool:
    """Of a fate: whether somebody passed over what it was about, and it was about something."""
    event = decode_record(record) if record.topic == "group-fates" else None
    if not isinstance(event, GroupFate):
        return True
    if event.decided_by != "pack":
        return bool(event.members)
    (group,) = [r for r in entries(log, "groups") if r.key == record.key]
    place = TopicPartition("groups", group.partition)
    return group.offset < log.committed("pack", [place]).get(place, 0)


def _id(record: Record) -> str:
    return next((value or b"" for name, value in record.headers if name == "ce_id"), b"").decode(
        "utf-8", "replace"
    )


def _source(record: Record) -> tuple[str, int, int]:
    event = decode_record(record)
    assert isinstance(event, DeadLetter)
    return event.source.topic, event.source.partition, event.source.offset


def test_what_nobody_refused_and_does_not_decode_is_told_with_its_reason() -> None:
    log = history(2)
    writer = log.writer()
    writer.write([Outgoing("fleet-status", b"k", b"no event", (("ce_id", b"one"),), 0)])
    unknown = MARKER + b"12345678" + b"body"
    writer.write([Outgoing("evaluations", b"k", unknown, (("ce_id", b"two"),), 0)])
    counted_ = counted(log)
    found = make_report(counted_, counted_.ledger).findings
    assert [(f.kind, f.position and (f.position.topic, f.position.offset)) for f in found] == [
        (Kind.SCHEMA_UNKNOWN, ("evaluations", log.end_offsets([TopicPartition("evaluations", 0)])[TopicPartition("evaluations", 0)] - 1)),
        (Kind.UNDECODABLE, ("fleet-status", log.end_offsets([TopicPartition("fleet-status", 0)])[TopicPartition("fleet-status", 0)] - 1)),
    ]  # fmt: skip
    assert "two" in found[0].detail


def test_groups_that_nobody_holds_are_lost_and_those_that_wait_are_open() -> None:
    log = history(3)
    before = counted(log).ledger
    group_id = new_group_id(BASE_MS * 1_000, 77)
    event = synthetic.rollout(group_id, 0, 1, at_us=BASE_MS * 1_000)
    log.writer().write([outgoing(event, source="test", time_us=BASE_MS * 1_000)])
    waits = counted(log).ledger
    assert waits.exact
    assert _open(waits, "groups") == _open(before, "groups") + 1
    for partition in range(log.partitions("rollouts")):
        place = TopicPartition("rollouts", partition)
        log.set_committed("assemble", place, log.end_offsets([place])[place])
    lost = counted(log).ledger
    assert [(one.event_id, one.wrong) for one in lost.differences] == [(event.rollout_id, "missing")]
    assert sum(one.lost for one in lost.flows if one.flow == "groups") == 1


def _open(ledger: HourLedger, flow: str) -> int:
    return [one.open for one in ledger.flows if one.flow == flow][-1]


@pytest.mark.parametrize("seed", SEEDS)
def test_t7_the_account_is_the_same_from_the_archive_when_the_log_lost_its_beginnings(seed: int) -> None:
    log, store, clock = history(seed), MemoryStore(), ManualClock(LATER_US)
    before = counted(log).ledger
    signer = LocalSigner(new_signing_key())
    seal_epoch(log, store, signer, name="run", clock=clock)
    whole = sealed(store, "run")
    archive_sealed(log, store, name="run", sealed=whole, clock=clock, stop=threading.Event())
    for place, segments in whole.segments.items():
        if TOPICS[place.topic].archive_ms:
            log.trim(place, segments[-1].next)
    with closing(ArchivedLog(log, store, "run")) as past:
        after = counted(past)
    assert after.lost == ()
    assert msgspec.structs.asdict(after.ledger) == msgspec.structs.asdict(before)
    assert digest_of(after.ledger) == digest_of(before)
    assert counted(log).records < after.records


def test_t7_the_account_is_the_same_in_every_time_zone_and_process() -> None:
    code = (
        "from rollwire.ops.simulate.run import Simulation\n"
        "from rollwire.consumers.audit.hours_count import count_hours\n"
        "from rollwire.consumers.audit.hours_report import digest_of\n"
        "import structlog, logging\n"
        "structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))\n"
        "for seed in (2, 5):\n"
        "    one = Simulation(seed); one.run()\n"
        "    print(digest_of(count_hours(one.log, '').ledger))\n"
    )
    told = {
        subprocess.run(
            [sys.executable, "-P", "-c", code],
            env={**os.environ, "TZ": zone, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        for zone, seed in (("UTC", "1"), ("Asia/Shanghai", "2"))
    }
    assert len(told) == 1
    assert len(told.pop().split()) == 2


def test_what_can_be_read_nowhere_is_a_gap_of_the_history_and_the_account_goes_on() -> None:
    log = history(2)
    place = TopicPartition("rollouts", 0)
    before = len(entries(log, "rollouts"))
    store, clock, signer = MemoryStore(), ManualClock(LATER_US), LocalSigner(new_signing_key())
    seal_epoch(log, store, signer, name="run", clock=clock, topics=["rollouts"])
    whole = sealed(store, "run")
    archive_sealed(log, store, name="run", sealed=whole, clock=clock, stop=threading.Event())
    for number in range(6):
        event = synthetic.rollout(new_group_id(BASE_MS * 1_000, number), 0, 1, at_us=BASE_MS * 1_000)
        log.writer().write([outgoing(event, source="test", time_us=BASE_MS * 1_000)._replace(partition=0)])
    end = log.end_offsets([place])[place]
    log.trim(place, end - 3)
    with closing(ArchivedLog(log, store, "run")) as past:
        counted_ = counted(past)
    (hole,) = counted_.lost
    assert (hole.partition, hole.next) == (place, end - 3)
    report = make_report(counted_, counted_.ledger)
    assert Kind.HISTORY_GAP in {f.kind for f in report.findings}
    received = sum(line.received for line in counted_.ledger.lines if line.topic == "rollouts")
    assert received == before + 3


def test_letters_that_retention_removed_leave_their_records_refused() -> None:
    log = history(3)
    place = TopicPartition("dead-letters", 0)
    log.writer().write([Outgoing("rollouts", b"key", b"no event", (("ce_id", b"nobody.0"),), 0)])
    poison = next(r for r in entries(log, "rollouts") if r.value == b"no event")
    for partition in range(log.partitions("rollouts")):
        at = TopicPartition("rollouts", partition)
        log.set_committed("assemble", at, log.end_offsets([at])[at])
    assert [one.event_id for one in counted(log).ledger.differences] == ["nobody.0"]
    letter = dead_letter(poison, Refused("not_framed", ""), refused_by="assemble", time_us=BASE_MS * 1_000)
    log.writer().write([letter._replace(partition=0)])
    assert counted(log).ledger.exact
    log.trim(place, log.end_offsets([place])[place])
    # Before their time nobody may have removed them: that hides nothing.
    soon = counted(log, poison.timestamp_ms + 29 * 24 * HOUR_MS).ledger
    assert "nobody.0" in {one.event_id for one in soon.differences}
    assert not soon.lapsed
    counted_ = counted(log, poison.timestamp_ms + 31 * 24 * HOUR_MS)
    assert counted_.ledger.exact
    assert counted_.ledger.lapsed["rollouts"] >= 1
    report = make_report(counted_, counted_.ledger)
    assert report.exit_code == 0
    assert any("letters" in note for note in report.notes)


def test_a_topic_that_is_not_there_is_a_note() -> None:
    log = history(1)
    del log._counts["weight-links"]
    counted_ = counted(log)
    assert counted_.absent == ("weight-links",)
    assert make_report(counted_, counted_.ledger).notes
    with pytest.raises(TopicMismatch):
        count_hours(log, "", settle_s=0.0)


def test_a_part_of_an_account_is_shown_by_topic_and_hour() -> None:
    ledger = counted(history(1)).ledger
    hours = sorted({line.hour for line in ledger.lines})
    some = chosen(ledger, topics=("rollouts",), since=hours[1], until=hours[3])
    assert {line.topic for line in some.lines} == {"rollouts"}
    assert {line.hour for line in some.lines} == set(hours[1:3])
    assert some.flows == ()
    assert chosen(ledger) == ledger
    assert {one.hour for one in chosen(ledger, until=hours[1]).flows} == {hours[0]}


def test_an_account_keeps_few_bytes_of_an_event() -> None:
    """Of feedback there may be millions in a day."""
    now_us = BASE_MS * 1_000
    made = records(Bodies("a", now_us), 0, 20_000, now_us, "acme", "")
    events = [
        Record("user-feedback", 0, n, BASE_MS, one.key, one.value, one.headers)
        for n, one in enumerate(record_of(event, now_us) for event in made)
    ]
    book = Book()
    book.add(events[0])
    tracemalloc.start()
    try:
        for event in events[1:]:
            book.add(event)
        kept, _ = tracemalloc.get_traced_memory()
        tally = book.close({}, {})
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(line.pending for line in tally.lines) == len(events)
    assert kept / len(events) < 40
    assert most / len(events) < 200
