"""One behaviour of membership in a group, for the twin in memory and for Apache Kafka."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from rollwire.schemas.errors import LogUnavailable, TopicMismatch
from rollwire.streams.seams.log import HeldBack, Member, Noted, Outgoing, SharedLog, TopicPartition
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.member_memory import MemoryMember
from rollwire.streams.seams.scan import scan

TOPICS = ("rewards", "rollouts")
ALL = frozenset(TopicPartition(topic, p) for topic in TOPICS for p in range(4))
IN = TopicPartition("rollouts", 0)


@pytest.fixture(params=["memory", pytest.param("kafka", marks=pytest.mark.system)])
def log(request: pytest.FixtureRequest) -> Iterator[SharedLog]:
    if request.param == "memory":
        yield MemoryLog({"rollouts": 4, "rewards": 4, "weight-versions": 1})
        return
    made = KafkaLog(request.getfixturevalue("stack").bootstrap, request.getfixturevalue("prefix"))
    yield made
    made.close()


@pytest.fixture
def group() -> str:
    return uuid.uuid4().hex


class Joined:
    """A member, and what was taken from it."""

    def __init__(self, log: SharedLog, group: str) -> None:
        self.revoked: list[frozenset[TopicPartition]] = []
        self.member: Member = log.member(group, TOPICS, self.revoked.append)
        self.held: frozenset[TopicPartition] = frozenset()

    def poll(self) -> None:
        self.held = self.member.poll(0.05)


def until(holds: Callable[[], bool], *members: Joined) -> None:
    deadline = time.monotonic() + 15
    while not holds():
        assert time.monotonic() < deadline, [member.held for member in members]
        for member in members:
            member.poll()


def test_one_member_gets_everything(log: SharedLog, group: str) -> None:
    one = Joined(log, group)
    until(lambda: one.held == ALL, one)
    assert one.revoked == []
    one.member.close()
    assert one.revoked == [ALL]


def test_two_members_get_whole_pairs_and_the_older_one_lets_go_first(log: SharedLog, group: str) -> None:
    one = Joined(log, group)
    until(lambda: one.held == ALL, one)
    two = Joined(log, group)
    until(lambda: len(one.held) == len(two.held) == 4, one, two)
    assert one.held | two.held == ALL
    assert one.revoked == [ALL]
    for held in (one.held, two.held):
        assert {p.partition for p in held if p.topic == "rollouts"} == {
            p.partition for p in held if p.topic == "rewards"
        }
    assert min(p.partition for p in one.held) == 0  # who was there first comes first
    one.member.close()
    until(lambda: two.held == ALL, two)
    two.member.close()


def test_a_member_commits_with_the_place_it_has_now(log: SharedLog, group: str) -> None:
    """C39: the writer outlives rebalances, since the place is read anew for every commit; without one it commits nothing."""
    one = Joined(log, group)
    until(lambda: one.held == ALL, one)
    writer = one.member.transactional_writer(f"{group}.0", 10.0)

    def commit(at: int) -> None:
        writer.begin()
        writer.write([Outgoing("weight-versions", b"k", b"%d" % at)])
        writer.commit(group, {IN: at}, 10.0)

    commit(1)
    two = Joined(log, group)
    until(lambda: len(one.held) == len(two.held) == 4, one, two)
    commit(2)
    two.member.close()
    until(lambda: one.held == ALL, one)
    commit(3)
    one.member.close()
    with pytest.raises(LogUnavailable):
        commit(4)
    writer.close()
    log.transactional_writer(f"{group}.0").close()  # ends what the closed one left open
    assert log.committed(group, [IN]) == {IN: 3}
    deadline = time.monotonic() + 10
    while len(found := [r.value for r in scan(log, ["weight-versions"])]) < 3 and time.monotonic() < deadline:
        continue
    assert found == [b"1", b"2", b"3"]


def test_a_topic_that_is_not_there(log: SharedLog, group: str) -> None:
    with pytest.raises(TopicMismatch, match="topics apply"):
        until(lambda: False, _missing(log, group))


def _missing(log: SharedLog, group: str) -> Joined:
    class Missing(Joined):
        def __init__(self) -> None:
            self.revoked = []
            self.member = log.member(group, ["nothing"], self.revoked.append)
            self.held = frozenset()

    return Missing()


def test_offsets_carry_notes(log: SharedLog, group: str) -> None:
    writer = log.transactional_writer(f"{group}.0", 10.0)
    writer.begin()
    other = TopicPartition("rollouts", 1)
    writer.commit(group, {IN: 1}, 10.0, also={f"{group}.notes": {IN: Noted(7, "why not"), other: 8}})
    writer.close()
    found = log.committed(f"{group}.notes", [IN, other])
    assert found == {IN: 7, other: 8}
    noted = found[IN]
    assert isinstance(noted, Noted)
    assert noted.note == "why not"
    assert not isinstance(found[other], Noted)


def test_c41_who_holds_readers_back_is_named(log: SharedLog, group: str) -> None:
    def held_back() -> dict[TopicPartition, HeldBack] | None:
        try:
            return log.held_back([IN, TopicPartition("rollouts", 1)])
        except LogUnavailable:
            return None  # it asks within a second: a busy broker is asked again

    wait_until(lambda: held_back() == {})
    writer = log.transactional_writer(f"{group}.open", 10.0)
    writer.begin()
    writer.write([Outgoing("rollouts", b"k", b"never", (), 0)])
    wait_until(lambda: held_back() == {IN: HeldBack(0, 1)})
    wait_until(lambda: log.openers("rollouts") == (f"{group}.open",))
    assert log.openers("rewards") == ()
    writer.abort()
    writer.close()
    wait_until(lambda: held_back() == {})


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "the condition did not come true"


def test_in_memory_a_silent_member_loses_its_place() -> None:
    log = MemoryLog({"rollouts": 4, "rewards": 4, "weight-versions": 1})
    one, two = Joined(log, "g"), Joined(log, "g")
    until(lambda: len(one.held) == len(two.held) == 4, one, two)
    assert isinstance(one.member, MemoryMember)
    writer = one.member.transactional_writer("g.0")
    writer.begin()
    writer.write([Outgoing("weight-versions", b"k", b"zombie")])
    log.groups["g"].expire(one.member)
    until(lambda: two.held == ALL, two)
    with pytest.raises(LogUnavailable, match="no longer a member"):
        writer.commit("g", {IN: 9})
    assert list(scan(log, ["weight-versions"])) == []
    until(lambda: len(one.revoked) == 1 and len(one.held) == 4, one, two)
