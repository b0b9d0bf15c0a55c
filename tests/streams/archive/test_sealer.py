"""What an epoch seals, and what sealers do to one another."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from rollwire.schemas.errors import HeadInvalid, KeyUnknown, SignatureInvalid
from rollwire.schemas.records import OffsetRange
from rollwire.streams.archive.heads import (
    Expired,
    Head,
    LocalSigner,
    new_signing_key,
    read_head,
    read_unverified,
    trusted_keys,
)
from rollwire.streams.archive.layout import head_key
from rollwire.streams.archive.sealed import Sealed, heads_of, marks_of, sealed, segments_of
from rollwire.streams.archive.sealer import UNSEALED, run_sealer, seal_epoch
from rollwire.streams.archive.verify import verify
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.log import Outgoing, Reader, TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.store_memory import MemoryStore

SIGNER = LocalSigner(new_signing_key())
TRUSTED = trusted_keys(SIGNER.public)
AT = TopicPartition("rollouts", 0)


class RacedStore(MemoryStore):
    """Somebody else seals, just before our head is created."""

    meanwhile: Callable[[], None] | None = None

    def create(self, key: str, data: bytes) -> bool:
        if "/heads/" in key and (meanwhile := self.meanwhile) is not None:
            self.meanwhile = None
            meanwhile()
        return super().create(key, data)


def log_of(clock: ManualClock) -> MemoryLog:
    return MemoryLog({"rollouts": 2, "rewards": 1}, clock)


def write(log: MemoryLog, count: int, partition: int = 0, topic: str = "rollouts") -> None:
    log.writer().write([Outgoing(topic, None, b"%d" % i, (), partition) for i in range(count)])


def seal(
    log: MemoryLog, store: MemoryStore, signer: LocalSigner = SIGNER, *, at_us: int = 5, **more: object
) -> Head | None:
    return seal_epoch(
        log,
        store,
        signer,
        name="run",
        clock=ManualClock(at_us),
        **more,  # type: ignore[arg-type]
    )


def test_an_epoch_holds_what_was_written_since_the_last_one() -> None:
    clock = ManualClock()
    log, store = log_of(clock), MemoryStore(clock)
    write(log, 600)
    first = seal(log, store)
    assert first is not None
    assert [(s.first, s.next, s.records) for s in segments_of(store, first)] == [
        (0, 256, 256),
        (256, 512, 256),
        (512, 600, 88),
    ]
    assert seal(log, store) is None
    write(log, 10)
    write(log, 5, partition=1)
    second = seal(log, store)
    assert second is not None
    assert [(s.partition, s.first, s.next) for s in segments_of(store, second)] == [(0, 600, 610), (1, 0, 5)]
    assert {at: len(marks) for at, marks in marks_of(store, second).items()} == {
        AT: 10,
        TopicPartition("rollouts", 1): 5,
    }
    assert [(p.partition, p.begin, p.next, p.records, p.segments) for p in second.partitions] == [
        (0, 0, 610, 610, 4),
        (1, 0, 5, 5, 1),
    ]
    stored = list(heads_of(store, "run"))
    assert second.previous == stored[0].digest
    assert [read_head(one.data, TRUSTED) for one in stored] == [first, second]
    everything = sealed(store, "run", trusted=TRUSTED)
    assert everything == sealed(store, "run", known=sealed_before(store))
    assert [s.next for s in everything.segments[AT]] == [256, 512, 600, 610]


def sealed_before(store: MemoryStore) -> Sealed:
    """What was sealed when there was one epoch."""
    old = MemoryStore()
    for info in store.list(""):
        if "/heads/" not in info.key or info.key == head_key("run", 1):
            old.create(info.key, store.get(info.key))
    return sealed(old, "run")


def test_only_what_is_decided_is_sealed() -> None:
    clock = ManualClock()
    log, store = log_of(clock), MemoryStore(clock)
    write(log, 3)
    writer = log.transactional_writer("w")
    writer.begin()
    writer.write([Outgoing("rollouts", None, b"open", (), 0)] * 4)
    write(log, 2)
    head = seal(log, store)
    assert head is not None
    assert [p.next for p in head.partitions] == [3]
    writer.abort()
    head = seal(log, store)
    assert head is not None
    # What was aborted is a hole of the segment behind it.
    assert [(s.first, s.next, s.records) for s in segments_of(store, head)] == [(3, 9, 2)]
    assert verify(log, store, name="run", trusted=TRUSTED, now_us=0).report.findings == ()


def test_of_two_sealers_the_second_goes_on_from_the_first() -> None:
    clock = ManualClock()
    log, store = log_of(clock), RacedStore(clock)
    write(log, 300)
    other = LocalSigner(new_signing_key())
    both = {**TRUSTED, **trusted_keys(other.public)}

    def meanwhile() -> None:
        assert seal(log, store, other, trusted=both) is not None
        write(log, 7)

    store.meanwhile = meanwhile
    head = seal(log, store, trusted=both)
    assert head is not None
    assert (head.epoch, head.key_id) == (2, SIGNER.key_id)
    assert [(s.first, s.next) for s in segments_of(store, head)] == [(300, 307)]
    report = verify(log, store, name="run", trusted=both, now_us=0).report
    assert report.findings == ()
    assert report.checked["records of the log"] == 307


def test_who_loses_with_nothing_left_seals_nothing() -> None:
    clock = ManualClock()
    log, store = log_of(clock), RacedStore(clock)
    write(log, 300)
    store.meanwhile = lambda: None if seal(log, store, at_us=6) else pytest.fail("nothing to seal")
    assert seal(log, store) is None
    assert [one.epoch for one in heads_of(store, "run")] == [1]


def test_a_sealer_goes_on_from_trusted_heads_only() -> None:
    clock = ManualClock()
    log, store = log_of(clock), MemoryStore(clock)
    write(log, 3)
    assert seal(log, store, LocalSigner(new_signing_key())) is not None
    write(log, 3)
    with pytest.raises(KeyUnknown):
        seal(log, store)
    data = store.get(head_key("run", 1))
    store.delete(head_key("run", 1))
    mine = MemoryStore()
    assert seal(log, mine) is not None
    store.create(head_key("run", 2), mine.get(head_key("run", 1)))
    with pytest.raises(HeadInvalid, match="epoch 1"):
        seal(log, store)
    assert read_unverified(data).epoch == 1
    store.delete(head_key("run", 2))
    store.create(head_key("run", 1), mine.get(head_key("run", 1)).replace(b'"records":6', b'"records":7'))
    with pytest.raises(SignatureInvalid):
        seal(log, store)


def test_a_long_log_is_sealed_in_several_epochs() -> None:
    clock = ManualClock()
    log, store = log_of(clock), MemoryStore(clock)
    write(log, 3_000)
    heads = []
    while head := seal(log, store, max_records=1_000):
        heads.append(head)
    assert len(heads) >= 3
    assert heads[-1].partitions[0].records == 3_000
    assert verify(log, store, name="run", trusted=TRUSTED, now_us=0).report.findings == ()


def test_what_was_gone_before_it_was_sealed_is_told_and_no_finding() -> None:
    clock = ManualClock()
    log, store = log_of(clock), MemoryStore(clock)
    write(log, 100)
    log.trim(AT, 40)
    first = seal(log, store)
    assert first is not None
    assert [(e.first, e.next, e.policy) for e in first.expired] == [(0, 40, UNSEALED)]
    write(log, 100)
    log.trim(AT, 150)
    second = seal(log, store)
    assert second is not None
    assert [(e.first, e.next, e.policy) for e in second.expired] == [(100, 150, UNSEALED)]
    write(log, 1)
    third = seal(log, store)
    assert third is not None
    assert third.expired == ()
    report = verify(log, store, name="run", trusted=TRUSTED, now_us=clock.now_us() + 10**18).report
    assert report.findings == ()
    assert sum(UNSEALED in note for note in report.notes) == 2


def test_retention_that_goes_on_while_an_epoch_is_read_ends_no_sealer() -> None:
    class Trimmed(MemoryLog):
        """Retention takes records between the look at the beginnings and the first read."""

        left = 2

        def reader(self) -> Reader:
            if self.left:
                self.left -= 1
                self.trim(AT, self.beginning_offsets([AT])[AT] + 10)
            return super().reader()

    clock = ManualClock()
    log, store = Trimmed({"rollouts": 2, "rewards": 1}, clock), MemoryStore(clock)
    write(log, 100)
    head = seal(log, store)
    assert head is not None
    assert log.left == 0
    assert [(p.begin, p.next) for p in head.partitions] == [(20, 100)]
    assert [(e.first, e.next, e.policy) for e in head.expired] == [(0, 20, UNSEALED)]
    assert verify(log, store, name="run", trusted=TRUSTED, now_us=0).report.findings == ()


def test_what_policies_took_and_what_is_archived_stands_in_the_next_head() -> None:
    clock = ManualClock()
    log, store = log_of(clock), MemoryStore(clock)
    write(log, 10)
    held = OffsetRange(topic="rollouts", partition=0, start=0, end=10)
    first = seal(log, store, archived=[held])
    assert first is not None
    assert first.archived == (held,)
    assert seal(log, store, archived=[held]) is None
    gone = Expired(topic="rollouts", partition=0, first=0, next=10, policy="archive_ms: 1 d", at_us=5)
    second = seal(log, store, expired=[gone])
    assert second is not None
    assert (second.expired, second.archived, second.size) == ((gone,), (held,), 0)
    longer = OffsetRange(topic="rollouts", partition=0, start=4, end=12)
    third = seal(log, store, archived=[longer])
    assert third is not None
    assert (third.expired, third.archived) == ((), (longer,))
    assert verify(log, store, name="run", trusted=TRUSTED, now_us=0).report.findings == ()


def test_a_running_sealer_seals_what_is_there_when_it_is_stopped() -> None:
    clock = ManualClock()
    log, store = log_of(clock), MemoryStore(clock)
    write(log, 10)
    stop = threading.Event()
    heads: list[Head] = []

    def sealed_one(head: Head) -> None:
        heads.append(head)
        write(log, 5)
        stop.set()

    run_sealer(
        log,
        store,
        SIGNER,
        name="run",
        clock=clock,
        stop=stop,
        every_s=3_600.0,
        sealed=lambda head: sealed_one(head) if not heads else heads.append(head),
    )
    assert [head.partitions[0].records for head in heads] == [10, 15]


class LockedStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, int] = {}

    def hold(self, key: str, until_us: int) -> bool:
        assert self.head(key) is not None
        self.held[key] = until_us
        return True


def test_what_is_sealed_is_locked_where_that_is_asked_for() -> None:
    log, store = log_of(ManualClock()), LockedStore()
    write(log, 3)
    assert seal(log, store) is not None
    assert store.held == {}
    write(log, 3)
    head = seal(log, store, lock_s=60.0)
    assert head is not None
    assert store.held == dict.fromkeys((head.table.key, head.marks.key, head_key("run", 2)), 60_000_005)
    write(log, 3)
    plain = MemoryStore()
    assert seal(log, plain, lock_s=60.0) is not None  # without locks it is sealed all the same
