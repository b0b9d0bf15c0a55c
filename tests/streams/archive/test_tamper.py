"""T8: whatever is done to a sealed log, to its heads or to its tables is found, and the first bad position named; what
nobody touched is clean."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import pytest

from rollwire.schemas.records import Position
from rollwire.streams.archive.chain import Chain, Segment
from rollwire.streams.archive.heads import (
    Head,
    LocalSigner,
    Signer,
    new_signing_key,
    read_unverified,
    sign,
    trusted_keys,
)
from rollwire.streams.archive.layout import head_key, table_key
from rollwire.streams.archive.leaves import tree_leaf
from rollwire.streams.archive.policies import Policy
from rollwire.streams.archive.sealed import claim_of, heads_of, pack_table, segments_of, sha256_of
from rollwire.streams.archive.sealer import seal_epoch
from rollwire.streams.archive.tree import root_of
from rollwire.streams.archive.verify import Verified, verify
from rollwire.streams.findings import Kind, Report
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.log import Outgoing, Record, TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.store_memory import MemoryStore

NAME = "run"
AT = TopicPartition("rollouts", 0)
OTHER = TopicPartition("rewards", 1)
FOR_EVER = {"rollouts": Policy(-1, False), "rewards": Policy(-1, False)}
SIGNER = LocalSigner(new_signing_key())
STRANGER = LocalSigner(new_signing_key())

Entries = list[Record | None]

HOUR_US = 3_600_000_000


class Sealed(NamedTuple):
    """A log of 1,000 events in `AT` and 300 in `OTHER`, sealed in four epochs."""

    log: MemoryLog
    store: MemoryStore
    clock: ManualClock

    def check(
        self,
        log: MemoryLog | None = None,
        *,
        sample: float | None = None,
        seen: dict[int, str] | None = None,
        later_us: int = 0,
        rollouts: Policy | None = None,
    ) -> Verified:
        """`rollouts`: that topic's policy, by default for ever as all others'."""
        return verify(
            log or self.log,
            self.store,
            name=NAME,
            trusted=trusted_keys(SIGNER.public),
            now_us=self.clock.now_us() + later_us,
            sample=sample,
            seen=seen,
            policies=FOR_EVER if rollouts is None else {**FOR_EVER, "rollouts": rollouts},
        )

    def rewritten(
        self, change: Callable[[Entries], None], at: TopicPartition = AT, begin: int = 0
    ) -> MemoryLog:
        """The same log after somebody wrote the partition's files anew, with offsets as they come."""
        entries: Entries = list(self.log._partitions[at].entries)
        change(entries)
        made = MemoryLog({"rollouts": 2, "rewards": 2}, self.clock)
        for place, partition in made._partitions.items():
            old = self.log._partitions[place]
            those = entries if place == at else old.entries
            partition.begin = begin if place == at else old.begin
            partition.entries = [
                None if entry is None else entry._replace(offset=partition.begin + i)
                for i, entry in enumerate(those)
            ]
        return made


def sealed_log(seed: int = 0) -> Sealed:
    chance = random.Random(seed)
    clock = ManualClock()
    log, store = MemoryLog({"rollouts": 2, "rewards": 2}, clock), MemoryStore(clock)
    for part in range(4):
        # Transactions, so that control records stand among the events; each event fills one offset.
        for _ in range(5):
            writer = log.transactional_writer("w")
            writer.begin()
            events = []
            for _ in range(50):
                events.append(outgoing(chance, "rollouts", 0))
            for _ in range(15):
                events.append(outgoing(chance, "rewards", 1))
            writer.write(events)
            writer.commit("g", {})
            clock.advance(1.0)
        head = seal_epoch(log, store, SIGNER, name=NAME, clock=clock, topics=["rollouts", "rewards"])
        assert head is not None
        assert head.epoch == part + 1
    return Sealed(log, store, clock)


def outgoing(chance: random.Random, topic: str, partition: int) -> Outgoing:
    return Outgoing(
        topic,
        chance.choice([None, chance.randbytes(8)]),
        chance.choice([None, chance.randbytes(chance.randrange(200))])
        if chance.random() < 0.1
        else chance.randbytes(30),
        (("ce_id", chance.randbytes(6)), ("note", None))[: chance.randrange(3)],
        partition,
    )


@pytest.fixture(scope="module")
def past() -> Sealed:
    return sealed_log()


def the_500th(log: MemoryLog) -> int:
    """The offset of event 500 of `AT`: control records stand before it."""
    return [e.offset for e in log._partitions[AT].entries if e is not None][500]


def change(offset: int, **fields: object) -> Callable[[Entries], None]:
    def apply(entries: Entries) -> None:
        entry = entries[offset]
        assert entry is not None
        changed = entry._replace(**fields)  # type: ignore[arg-type]
        assert changed != entry
        entries[offset] = changed

    return apply


def position(offset: int, at: TopicPartition = AT) -> Position:
    return Position(topic=at.topic, partition=at.partition, offset=offset)


@pytest.mark.parametrize("seed", range(10))
def test_t8_a_clean_log_is_clean(seed: int) -> None:
    past = sealed_log(seed)
    report = past.check().report
    assert report.findings == ()
    assert report.checked["records of the log"] == 1_300
    assert report.checked["segments verified"] == report.checked["segments"] > 4
    assert past.check(sample=0.3).report.findings == ()


@pytest.mark.parametrize(
    "fields",
    [
        {"value": b"another payload"},
        {"value": None},
        {"key": b"another key"},
        {"headers": (("ce_id", b"another"),)},
        {"timestamp_ms": 1},
    ],
    ids=["payload", "payload-removed", "key", "header", "timestamp"],
)
def test_t8_c86_a_changed_record_is_named(past: Sealed, fields: dict[str, object]) -> None:
    offset = the_500th(past.log)
    report = past.check(past.rewritten(change(offset, **fields))).report
    assert [(f.kind, f.position) for f in report.findings] == [(Kind.RECORD_CHANGED, position(offset))]


def test_t8_one_flipped_bit_of_any_record_is_named(past: Sealed) -> None:
    offsets = [e.offset for e in past.log._partitions[AT].entries if e is not None and e.value]
    for offset in random.Random(1).sample(offsets, 25):
        entry = past.log._partitions[AT].entries[offset]
        assert entry is not None
        assert entry.value
        flipped = bytes([entry.value[0] ^ 1]) + entry.value[1:]
        report = past.check(past.rewritten(change(offset, value=flipped))).report
        assert [(f.kind, f.position) for f in report.findings] == [(Kind.RECORD_CHANGED, position(offset))]


def neighbours(log: MemoryLog) -> int:
    """An event whose offset's successor is an event as well, both in one segment, after the 400th."""
    entries = log._partitions[AT].entries
    return next(i for i in range(405, 500) if entries[i] is not None and entries[i + 1] is not None)


def test_t8_c86_swapped_neighbours_are_named(past: Sealed) -> None:
    at = neighbours(past.log)

    def swap(entries: Entries) -> None:
        entries[at], entries[at + 1] = entries[at + 1], entries[at]

    report = past.check(past.rewritten(swap)).report
    assert [(f.kind, f.position) for f in report.findings] == [(Kind.ORDER_CHANGED, position(at))]


def test_t8_a_record_taken_out_is_named_though_all_behind_it_moved_up(past: Sealed) -> None:
    at = neighbours(past.log)
    report = past.check(past.rewritten(lambda entries: entries.__delitem__(at))).report
    # Not a finding for each segment behind it.
    assert [(f.kind, f.position) for f in report.findings] == [(Kind.RECORDS_MISSING, position(at))]


def test_t8_a_record_blanked_out_is_named(past: Sealed) -> None:
    at = neighbours(past.log)
    report = past.check(past.rewritten(lambda entries: entries.__setitem__(at, None))).report
    assert [(f.kind, f.position) for f in report.findings] == [(Kind.RECORDS_MISSING, position(at))]


def test_t8_a_repeated_record_is_named(past: Sealed) -> None:
    at = neighbours(past.log)
    report = past.check(past.rewritten(lambda entries: entries.insert(at + 1, entries[at]))).report
    assert [(f.kind, f.position) for f in report.findings] == [(Kind.RECORDS_ADDED, position(at + 1))]


def test_t8_an_inserted_record_is_named(past: Sealed) -> None:
    at = neighbours(past.log)
    stranger = Record("rollouts", 0, 0, 5, None, b"slipped in", ())
    report = past.check(past.rewritten(lambda entries: entries.insert(at + 1, stranger))).report
    assert [(f.kind, f.position) for f in report.findings] == [(Kind.RECORDS_ADDED, position(at + 1))]


def test_t8_a_record_in_the_place_of_a_control_record_is_named(past: Sealed) -> None:
    entries = past.log._partitions[AT].entries
    at = next(i for i in range(405, 500) if entries[i] is None)
    stranger = Record("rollouts", 0, at, 5, None, b"slipped in", ())
    report = past.check(past.rewritten(lambda entries: entries.__setitem__(at, stranger))).report
    assert [(f.kind, f.position) for f in report.findings] == [(Kind.RECORDS_ADDED, position(at))]


def test_t8_c86_a_cut_tail_is_named(past: Sealed) -> None:
    offsets = [e.offset for e in past.log._partitions[AT].entries if e is not None]
    cut = offsets[-10]
    report = past.check(past.rewritten(lambda entries: entries.__delitem__(slice(cut, None)))).report
    assert [(f.kind, f.position) for f in report.findings] == [(Kind.RECORDS_MISSING, position(cut))]


def test_t8_a_cut_head_is_named(past: Sealed) -> None:
    log = past.rewritten(lambda entries: entries.__delitem__(slice(0, 300)), begin=300)
    report = past.check(log).report
    assert [(f.kind, f.position) for f in report.findings] == [(Kind.RECORDS_MISSING, position(0))]


def test_t8_a_head_cut_by_one_record_is_named(past: Sealed) -> None:
    log = past.rewritten(lambda entries: entries.__delitem__(0), begin=1)
    report = past.check(log).report
    assert [(f.kind, f.position) for f in report.findings] == [(Kind.RECORDS_MISSING, position(0))]


def test_t8_c86_a_dropped_partition_is_named(past: Sealed) -> None:
    log = MemoryLog({"rollouts": 2, "rewards": 1}, past.clock)
    log._partitions[AT] = past.log._partitions[AT]
    report = past.check(log).report
    assert [(f.kind, f.position) for f in report.findings] == [(Kind.PARTITION_MISSING, position(0, OTHER))]


def test_t8_a_dropped_topic_is_named(past: Sealed) -> None:
    log = MemoryLog({"rewards": 2}, past.clock)
    log._partitions[OTHER] = past.log._partitions[OTHER]
    report = past.check(log).report
    assert [(f.kind, f.position) for f in report.findings] == [(Kind.PARTITION_MISSING, position(0))]


def swap_with_next(at: int) -> Callable[[Entries], None]:
    def apply(entries: Entries) -> None:
        entries[at], entries[at + 1] = entries[at + 1], entries[at]

    return apply


DONE: dict[str, tuple[Callable[[int], Callable[[Entries], None]], int, Kind]] = {
    # what is done at an offset, where it shows behind it, and as what
    "changed": (lambda at: change(at, value=b"no record has this"), 0, Kind.RECORD_CHANGED),
    "swapped": (swap_with_next, 0, Kind.ORDER_CHANGED),
    "taken out": (lambda at: lambda entries: entries.__delitem__(at), 0, Kind.RECORDS_MISSING),
    "blanked": (lambda at: lambda entries: entries.__setitem__(at, None), 0, Kind.RECORDS_MISSING),
    "repeated": (lambda at: lambda entries: entries.insert(at + 1, entries[at]), 1, Kind.RECORDS_ADDED),
    "slipped in": (
        lambda at: lambda entries: entries.insert(at, Record("rollouts", 0, 0, 5, None, b"slipped in", ())),
        0,
        Kind.RECORDS_ADDED,
    ),
}


@pytest.mark.parametrize("what", DONE)
def test_t8_c86_it_is_named_wherever_it_is_done(what: str) -> None:
    """At the ends of segments and of epochs too."""
    clock = ManualClock()
    log, store = MemoryLog({"rollouts": 2, "rewards": 2}, clock), MemoryStore(clock)
    for part in range(2):
        events = [Outgoing("rollouts", None, b"%d of %d" % (i, part), (), 0) for i in range(600)]
        log.writer().write(events)
        assert seal_epoch(log, store, SIGNER, name=NAME, clock=clock, topics=["rollouts"])
    past = Sealed(log, store, clock)
    do, behind, kind = DONE[what]
    ends = [s.next for head in heads(past) for s in segments_of(store, head)]
    assert ends == [256, 512, 600, 856, 1_112, 1_200]
    chosen = {end + i for end in (0, *ends) for i in (-2, -1, 0, 1)} & set(range(1_198))
    kinds = []
    for at in sorted(chosen | set(random.Random(what).sample(range(1_198), 10))):
        finding = past.check(past.rewritten(do(at))).report.findings[0]
        assert finding.position == position(at + behind), (what, at)
        kinds.append(finding.kind)
    # Where an epoch ends its marks end: what is moved across may be taken for changed there.
    assert kinds.count(kind) >= len(kinds) - 3


# -- heads and tables ----------------------------------------------------------------------------------------------------


def copied(past: Sealed) -> Sealed:
    store = MemoryStore(past.clock)
    for info in past.store.list("archive/"):
        store.create(info.key, past.store.get(info.key))
    return past._replace(store=store)


def replace(past: Sealed, key: str, data: bytes) -> None:
    past.store.delete(key)
    past.store.create(key, data)


def heads(past: Sealed) -> list[Head]:
    return [read_unverified(one.data) for one in heads_of(past.store, NAME)]


def rehashed(past: Sealed, log: MemoryLog, epochs: Sequence[int], signer: Signer) -> None:
    """What somebody does who has the store, and perhaps a key: chain, tables and heads anew, over a changed log."""
    chains: dict[TopicPartition, Chain] = {}
    before = ""
    for head in heads(past):
        if head.epoch not in epochs:
            before = sha256_of(past.store.get(head_key(NAME, head.epoch)))
            continue
        table = []
        for old in segments_of(past.store, head):
            place = TopicPartition(old.topic, old.partition)
            if place not in chains:
                was = next((h.partition(place) for h in heads(past) if h.epoch == head.epoch - 1), None)
                chains[place] = Chain(place, old.first, bytes.fromhex(was.chain) if was else None)
            made: Segment | None = None
            for entry in log._partitions[place].entries[old.first : old.next]:
                if entry is not None:
                    made = chains[place].add(entry) or made
            made = chains[place].close() or made
            assert made is not None
            table.append(made)
        data = pack_table(table)
        sha = sha256_of(data)
        forged = msgspec.structs.replace(
            head,
            previous=before,
            root=root_of([tree_leaf(s.digest, s.chain) for s in table]).hex(),
            table=claim_of(table_key(NAME, head.epoch, sha), data, sha),
            key_id=signer.key_id,
            partitions=tuple(
                msgspec.structs.replace(p, chain=chains[p.at].chain.hex()) if p.at in chains else p
                for p in head.partitions
            ),
        )
        past.store.create(forged.table.key, data)
        signed = sign(forged, signer)
        replace(past, head_key(NAME, head.epoch), signed)
        before = sha256_of(signed)


def changed_log(past: Sealed) -> tuple[MemoryLog, int]:
    offset = the_500th(past.log)
    return past.rewritten(change(offset, value=b"rewritten")), offset


def pinned(past: Sealed) -> dict[int, str]:
    newest = past.check().newest
    assert newest is not None
    return {newest.epoch: newest.digest}


def test_t8_c86_rehashed_tables_do_not_hide_a_change(past: Sealed) -> None:
    log, offset = changed_log(past)
    forged = copied(past)
    signed = {one.key: one.data for one in heads_of(forged.store, NAME)}
    was = {head.epoch: head.table.key for head in heads(forged)}
    rehashed(forged, log, (3, 4), STRANGER)
    # Without a key of ours the heads stay as they were: only the tables are exchanged.
    for head in heads(forged):
        if head.epoch > 2:
            replace(forged, was[head.epoch], forged.store.get(head.table.key))
    for key, data in signed.items():
        replace(forged, key, data)
    report = forged.check(log).report
    tables = [f for f in report.findings if f.kind is Kind.HEAD_INVALID]
    assert [f.where for f in tables] == ["head 3", "head 4"]
    assert [(f.kind, f.position) for f in report.findings if f not in tables] == [
        (Kind.RECORD_CHANGED, position(offset))
    ]


def test_t8_heads_signed_by_another_key_are_named(past: Sealed) -> None:
    log, _ = changed_log(past)
    forged = copied(past)
    rehashed(forged, log, (3, 4), STRANGER)
    report = forged.check(log).report
    assert [(f.kind, f.where) for f in report.findings] == [(Kind.KEY_UNKNOWN, f"head {e}") for e in (3, 4)]


def test_t8_a_history_rehashed_by_a_holder_of_the_key_is_known_by_what_was_seen_before(past: Sealed) -> None:
    log, _ = changed_log(past)
    seen = pinned(past)
    forged = copied(past)
    rehashed(forged, log, (3, 4), SIGNER)
    report = forged.check(log, seen=seen).report
    assert [(f.kind, f.where) for f in report.findings] == [(Kind.HEAD_FORKED, "head 4")]


def test_t8_c86_two_heads_of_one_epoch_are_named(past: Sealed) -> None:
    log, _ = changed_log(past)
    forged = copied(past)
    rehashed(forged, log, (3,), SIGNER)
    report = forged.check(log).report
    assert (Kind.HEAD_FORKED, "head 3") in [(f.kind, f.where) for f in report.findings]
    # The chain of what follows does not come from it either.
    assert (Kind.CHAIN_BROKEN, "rollouts[0]") in [(f.kind, f.where[:11]) for f in report.findings]


def test_t8_newest_heads_taken_away_are_known_by_what_was_seen_before(past: Sealed) -> None:
    seen = pinned(past)
    old = copied(past)
    for epoch in (3, 4):
        old.store.delete(head_key(NAME, epoch))
    assert [(f.kind, f.where) for f in old.check(seen=seen).report.findings] == [
        (Kind.HEAD_ROLLED_BACK, "head 4")
    ]


def test_t8_an_old_head_in_the_place_of_a_newer_one_is_named(past: Sealed) -> None:
    old = copied(past)
    replace(old, head_key(NAME, 4), old.store.get(head_key(NAME, 2)))
    report = old.check().report
    assert [(f.kind, f.where) for f in report.findings] == [(Kind.HEAD_INVALID, "head 4")]


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_t8_a_head_taken_out_of_the_middle_is_named(past: Sealed, epoch: int) -> None:
    cut = copied(past)
    cut.store.delete(head_key(NAME, epoch))
    report = cut.check().report
    assert [(f.kind, f.where) for f in report.findings] == [(Kind.HEAD_MISSING, f"head {epoch}")]


def test_t8_no_head_at_all_is_no_clean_history(past: Sealed) -> None:
    assert [f.kind for f in past._replace(store=MemoryStore(past.clock)).check().report.findings] == [
        Kind.HEAD_MISSING
    ]


@pytest.mark.parametrize(
    ("forge", "kind"),
    [
        (lambda data: data.replace(b'"epoch":3', b'"epoch": 3'), Kind.HEAD_INVALID),
        (lambda data: data.replace(b'"records":', b'"records":1'), Kind.SIGNATURE_INVALID),
        (lambda data: data[:-20], Kind.HEAD_INVALID),
        (lambda data: sign(read_unverified(data), STRANGER), Kind.SIGNATURE_INVALID),
        (lambda data: b"", Kind.HEAD_INVALID),
    ],
    ids=["spaces", "count", "cut", "key-swapped", "empty"],
)
def test_t8_a_forged_head_is_named(past: Sealed, forge: Callable[[bytes], bytes], kind: Kind) -> None:
    forged = copied(past)
    key = head_key(NAME, 3)
    replace(forged, key, forge(forged.store.get(key)))
    assert (kind, "head 3") == next((f.kind, f.where) for f in forged.check().report.findings)


def test_t8_records_are_checked_without_their_table(past: Sealed) -> None:
    log, offset = changed_log(past)
    cut = copied(past)
    for head in heads(past):
        cut.store.delete(head.table.key)
    report = cut.check(log).report
    assert [f.where for f in report.findings[:4]] == [f"head {e}" for e in (1, 2, 3, 4)]
    assert {f.kind for f in report.findings[:4]} == {Kind.HEAD_MISSING}
    assert [(f.kind, f.position) for f in report.findings[4:]] == [(Kind.RECORD_CHANGED, position(offset))]


def test_t8_without_marks_a_change_is_named_by_its_segment(past: Sealed) -> None:
    log, offset = changed_log(past)
    cut = copied(past)
    for head in heads(past):
        cut.store.delete(head.marks.key)
    holding = next(
        s
        for head in heads(past)
        for s in segments_of(past.store, head)
        if (s.topic, s.partition) == AT and s.first <= offset < s.next
    )
    report = cut.check(log).report
    assert (Kind.RECORD_CHANGED, position(holding.first)) in [(f.kind, f.position) for f in report.findings]
    assert Kind.HEAD_MISSING in {f.kind for f in report.findings}


def test_c86_a_chain_forged_in_the_middle_is_named_though_both_ends_are_right(past: Sealed) -> None:
    forged = copied(past)
    head = heads(past)[1]
    table = list(segments_of(past.store, head))
    bad = next(i for i, s in enumerate(table) if (s.topic, s.partition) == AT)
    table[bad] = msgspec.structs.replace(table[bad], digest=bytes(32))
    data = pack_table(table)
    sha = sha256_of(data)
    made = msgspec.structs.replace(
        head,
        root=root_of([tree_leaf(s.digest, s.chain) for s in table]).hex(),
        table=claim_of(table_key(NAME, head.epoch, sha), data, sha),
    )
    forged.store.create(made.table.key, data)
    replace(forged, head_key(NAME, 2), sign(made, SIGNER))
    kinds = [(f.kind, f.position) for f in forged.check().report.findings]
    assert (Kind.CHAIN_BROKEN, position(table[bad].first)) in kinds


@pytest.mark.parametrize("folder", ["heads", "tables", "marks"])
def test_t8_any_damage_to_what_is_sealed_is_found_and_ends_no_audit(past: Sealed, folder: str) -> None:
    chance = random.Random(folder)
    for _ in range(40):
        damaged = copied(past)
        key = chance.choice([info.key for info in past.store.list(f"archive/{NAME}/{folder}/")])
        data = bytearray(damaged.store.get(key))
        at = chance.randrange(len(data))
        if chance.random() < 0.2:
            del data[at:]
        else:
            data[at] ^= 1 << chance.randrange(8)
        replace(damaged, key, bytes(data))
        findings = damaged.check().report.findings
        assert findings, (key, at)
        epoch = int(key.rsplit("/", 1)[1][:12])
        assert findings[0].where == f"head {epoch}"


# -- what is no tampering ------------------------------------------------------------------------------------------------


def test_what_retention_took_is_a_note_and_not_a_finding(past: Sealed) -> None:
    log = past.rewritten(lambda entries: entries.__delitem__(slice(0, 300)), begin=300)
    kept = past.check(log, later_us=HOUR_US, rollouts=Policy(60_000, False)).report
    assert kept.findings == ()
    assert any(
        note.startswith("rollouts[0] 0 to ") and "retention.ms of rollouts: 1 min" in note
        for note in kept.notes
    )
    # The part of a segment that is left is still looked at.
    entries = [e for e in log._partitions[AT].entries if e is not None]
    log._partitions[AT].entries[0] = entries[0]._replace(value=b"changed")
    left = past.check(log, later_us=HOUR_US, rollouts=Policy(60_000, False)).report
    assert [(f.kind, f.position) for f in left.findings] == [(Kind.RECORD_CHANGED, position(300))]


def test_what_went_too_early_for_its_retention_is_a_finding(past: Sealed) -> None:
    log = past.rewritten(lambda entries: entries.__delitem__(slice(0, 300)), begin=300)
    report = past.check(log, later_us=HOUR_US, rollouts=Policy(86_400_000, False)).report
    assert [(f.kind, f.position) for f in report.findings] == [(Kind.RECORDS_MISSING, position(0))]


def test_a_compacted_topic_may_lose_records_and_not_change_them(past: Sealed) -> None:
    def compact(entries: Entries) -> None:
        for i in range(0, 400, 3):
            entries[i] = None

    def check(log: MemoryLog) -> Report:
        return past.check(log, rollouts=Policy(-1, True)).report

    compacted = past.rewritten(compact)
    assert check(compacted).findings == ()
    assert any("cleanup.policy of rollouts: compact" in note for note in check(compacted).notes)
    at = next(e.offset for e in compacted._partitions[AT].entries[100:] if e is not None)
    change(at, value=b"changed")(compacted._partitions[AT].entries)
    assert [(f.kind, f.position) for f in check(compacted).findings] == [(Kind.RECORD_CHANGED, position(at))]
