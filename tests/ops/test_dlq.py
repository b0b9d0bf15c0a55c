"""Dead letters: found, shown, replayed once and dropped, also when the one who does it dies in between."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import pytest
from rich.console import Console

from rollwire.consumers.ledger import count_ledger
from rollwire.ops.commands.dlq import _confirmed
from rollwire.ops.dlq import letters as dlq
from rollwire.ops.dlq import settle as settling
from rollwire.ops.dlq.settle import Order, settle
from rollwire.ops.dlq.show import find, hex_lines, lines
from rollwire.ops.readable import readable_record
from rollwire.schemas.advice import ADVICE
from rollwire.schemas.catalogue import TOPICS
from rollwire.schemas.errors import ConfigError, Fenced, LogUnavailable, Refused, TransactionUnknown
from rollwire.schemas.reasons import REASONS, Reason
from rollwire.schemas.records import DeadLetter
from rollwire.streams import synthetic
from rollwire.streams.dead_letter import KEPT_HEADERS, dead_letter
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.log import Log, Outgoing, Record, TopicPartition, TransactionalWriter
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.settlement import (
    REPLAY_COUNT,
    REPLAY_OF,
    LetterAt,
    Settlement,
    mark,
    parse_letter,
    replay_count,
    settlement_of,
)

NOW_US = 1_767_225_600_000_000
REPLAY = Order("replayed", "the registry is back", "ada")
DROP = Order("dropped", "foreign", "ada")


def new_log() -> MemoryLog:
    return MemoryLog({name: spec.partitions for name, spec in TOPICS.items()}, ManualClock(now_us=NOW_US))


def refuse(
    log: Log,
    topic: str,
    value: bytes | None,
    reason: Reason,
    *,
    partition: int = 0,
    key: bytes | None = b"k",
    headers: tuple[tuple[str, bytes | None], ...] = (("a", b"\xff"), ("a", None)),
    at_us: int = NOW_US,
) -> None:
    """A record that stands in its topic, and its dead letter."""
    log.writer().write([Outgoing(topic, key, value, headers, partition)])
    record = [r for r in scan(log, [topic]) if r.partition == partition][-1]
    letter = dead_letter(record, Refused(reason, "said"), refused_by="assemble", time_us=at_us)
    log.writer().write([letter])


def records(log: Log, topic: str) -> list[Record]:
    return list(scan(log, [topic]))


def test_every_reason_has_advice() -> None:
    assert set(REASONS) <= set(ADVICE)
    assert all(text.endswith(".") and len(text) < 130 for text in ADVICE.values())


def test_letters_are_counted_by_reason_and_topic() -> None:
    log = new_log()
    refuse(log, "rollouts", b"x", "not_framed", partition=2, at_us=NOW_US)
    refuse(log, "rollouts", b"y", "not_framed", partition=1, at_us=NOW_US + 5)
    refuse(log, "rewards", None, "tombstone_not_allowed")
    log.writer().write([Outgoing("dead-letters", b"rollouts", b"no letter")])
    read = dlq.read_letters(log)
    assert read.foreign == 1
    rows = dlq.table(read.letters)
    assert [(row.reason, row.topic, row.counts["pending"]) for row in rows] == [
        ("not_framed", "rollouts", 2),
        ("tombstone_not_allowed", "rewards", 1),
    ]
    assert (rows[0].oldest_us, rows[0].newest_us) == (NOW_US, NOW_US + 5)
    assert read.letters[0].id == "assemble/rollouts/2/0"


@pytest.mark.parametrize(
    ("where", "found"),
    [
        (dlq.Where(), 3),
        (dlq.Where(reasons=("not_framed",)), 2),
        (dlq.Where(topics=("rewards",)), 1),
        (dlq.Where(partition=2), 1),
        (dlq.Where(partition=2, offset=1), 0),
        (dlq.Where(since_us=NOW_US + 1), 1),
        (dlq.Where(until_us=NOW_US + 1), 2),
        (dlq.Where(refused_by="pack"), 0),
        (dlq.Where(key=b"\xff"), 1),
        (dlq.Where(names=("0:0", "assemble/rewards/0/0")), 2),
        (dlq.Where(states=("replayed", "dropped")), 0),
    ],
)
def test_filters(where: dlq.Where, found: int) -> None:
    log = new_log()
    refuse(log, "rollouts", b"x", "not_framed", partition=2)
    refuse(log, "rollouts", b"y", "not_framed", partition=1, key=b"\xff", at_us=NOW_US + 5)
    refuse(log, "rewards", None, "tombstone_not_allowed")
    dlq.check(where)
    assert sum(dlq.fits(letter, where) for letter in dlq.read_letters(log).letters) == found


def test_what_can_match_nothing_is_an_error() -> None:
    for where in (
        dlq.Where(reasons=("laet",)),
        dlq.Where(topics=("rolouts",)),
        dlq.Where(since_us=2, until_us=2),
    ):
        with pytest.raises(ConfigError):
            dlq.check(where)
    for parse in (
        lambda: dlq.parse_time("soon", 0),
        lambda: dlq.parse_key("hex:x"),
        lambda: parse_letter("0-1"),
    ):
        with pytest.raises(ConfigError):
            parse()


def test_times_and_keys() -> None:
    assert dlq.parse_time("90s", NOW_US) == NOW_US - 90_000_000
    assert dlq.parse_time("2026-01-01T00:00", 0) == dlq.parse_time("2026-01-01T01:00+01:00", 0) == NOW_US
    assert (dlq.parse_key("k"), dlq.parse_key("hex:ff00")) == (b"k", b"\xff\x00")


def test_a_replay_writes_the_record_as_it_was_and_marks_its_letter() -> None:
    log = new_log()
    refuse(log, "rollouts", b"\x00raw", "unknown_schema", partition=3)
    clock = ManualClock(now_us=NOW_US)
    told: list[int] = []
    outcome = settle(log, "p.", dlq.read_letters(log).letters, REPLAY, clock, told.append)
    assert outcome == settling.Outcome(1, ())
    assert told[-1] == 1
    first, copy = records(log, "rollouts")
    assert (copy.partition, copy.key, copy.value) == (3, b"k", b"\x00raw")
    assert copy.headers == (*first.headers, (REPLAY_OF, b"0:0"), (REPLAY_COUNT, b"1"))
    letter = dlq.read_letters(log).letters[0]
    assert (letter.state, letter.marks[0].why, letter.marks[0].by) == ("replayed", REPLAY.why, "ada")
    # It is not pending any more, and the same list again replays nothing.
    assert not dlq.fits(letter, dlq.Where(states=("pending",)))


def test_a_letter_that_someone_settled_meanwhile_is_not_settled_again() -> None:
    log = new_log()
    refuse(log, "rollouts", b"x", "unknown_schema")
    chosen = dlq.read_letters(log).letters
    for _ in range(2):
        assert settle(log, "p.", chosen, REPLAY, ManualClock(now_us=NOW_US)).settled == 1
    assert len(records(log, "rollouts")) == 2


def test_again_replays_once_more_and_counts_on() -> None:
    log = new_log()
    refuse(log, "rollouts", b"x", "unknown_schema")
    clock = ManualClock(now_us=NOW_US)
    for count in (1, 2):
        settle(log, "p.", dlq.read_letters(log).letters, REPLAY, clock)
        assert records(log, "rollouts")[-1].headers[-2:] == (
            (REPLAY_OF, b"0:0"),
            (REPLAY_COUNT, str(count).encode()),
        )
        clock.advance(1.0)
    # What was replayed and refused again names its newest letter only, and counts on.
    third = records(log, "rollouts")[-1]
    log.writer().write([dead_letter(third, Refused("malformed", ""), refused_by="assemble", time_us=NOW_US)])
    newest = dlq.read_letters(log).letters[-1]
    assert newest.replays == 2
    settle(log, "p.", [newest], REPLAY, clock)
    names = [name for name, _ in records(log, "rollouts")[-1].headers]
    assert names.count(REPLAY_OF) == names.count(REPLAY_COUNT) == 1
    assert replay_count(records(log, "rollouts")[-1].headers) == 3


def test_a_group_is_replayed_once_a_letter_so_that_no_pack_trains_it_twice() -> None:
    log = new_log()
    refuse(log, "groups", b"x", "unknown_schema")
    refuse(log, "groups", b"y", "unknown_schema")
    clock = ManualClock(now_us=NOW_US)
    # One that was dropped was never written again: it may be.
    settle(log, "p.", dlq.read_letters(log).letters[1:], DROP, clock)
    for settled in (2, 0):
        clock.advance(1.0)
        outcome = settle(log, "p.", dlq.read_letters(log).letters, REPLAY, clock)
        assert outcome.settled == settled
        assert len(records(log, "groups")) == 4
    assert all("was replayed before" in failure.why for failure in outcome.failures)
    assert len(outcome.failures) == 2
    # Where the copy was refused as well, that is a letter of its own.
    copy = records(log, "groups")[-1]
    log.writer().write([dead_letter(copy, Refused("malformed", ""), refused_by="pack", time_us=NOW_US)])
    clock.advance(1.0)
    assert settle(log, "p.", dlq.read_letters(log).letters, REPLAY, clock).settled == 1
    assert replay_count(records(log, "groups")[-1].headers) == 2


def test_a_drop_marks_and_writes_nothing_else() -> None:
    log = new_log()
    refuse(log, "rollouts", b"x", "not_framed")
    settle(log, "p.", dlq.read_letters(log).letters, DROP, ManualClock(now_us=NOW_US))
    assert len(records(log, "rollouts")) == 1
    assert dlq.read_letters(log).letters[0].state == "dropped"


def test_what_cannot_be_written_as_it_was_fails_and_the_others_pass() -> None:
    log = new_log()
    refuse(log, "rollouts", b"x", "unknown_schema")
    refuse(log, "groups", b"x", "version_future")
    refuse(log, "rollouts", b"x", "header_mismatch", headers=(("h", b""),) * (KEPT_HEADERS + 1))
    big = Record("rewards", 0, 0, NOW_US // 1_000, b"k", b"x" * (8 << 20), ())
    log.writer().write([dead_letter(big, Refused("too_large", ""), refused_by="assemble", time_us=NOW_US)])
    outcome = settle(log, "p.", dlq.read_letters(log).letters, REPLAY, ManualClock(now_us=NOW_US))
    assert outcome.settled == 1
    assert {failure.at: failure.why.split(":")[0] for failure in outcome.failures} == {
        LetterAt(0, 1): "its group has its fate, and meets no second one",
        LetterAt(0, 2): f"only its first {KEPT_HEADERS} headers were kept",
        LetterAt(0, 3): outcome.failures[-1].why,
    }
    assert [letter.state for letter in dlq.read_letters(log).letters] == ["replayed", *["pending"] * 3]


class _Waiting(MemoryLog):
    """Somebody else's transaction is open on the topics that are named; it ends when a reader has waited for it."""

    def __init__(self, *topics: str) -> None:
        super().__init__(dict.fromkeys(TOPICS, 1), ManualClock(now_us=NOW_US))
        self._other = self.take_over("p.trainer", 1.0)
        self._other.begin()
        self._other.write([Outgoing(topic, b"policy", b"theirs") for topic in topics])

    def wait(self, seconds: float) -> None:
        if self._other.transaction is not None:
            self._other.abort()


def test_marks_behind_a_transaction_of_somebody_else_are_not_missed() -> None:
    log = _Waiting("notices")
    refuse(log, "rollouts", b"x", "not_framed")
    chosen = dlq.read_letters(log).letters
    for _ in range(2):  # the second time as after a doubt: the first one's transaction had ended well
        settle(log, "p.", chosen, REPLAY, ManualClock(now_us=NOW_US))
    assert len(records(log, "rollouts")) == 2


class _Dying:
    """A log whose transactional writers die: at the nth call of `write` or `commit`, before or after it took effect."""

    def __init__(self, log: MemoryLog, at: int, error: type[BaseException], *, after: bool) -> None:
        self._log, self._at, self._error, self._after = log, at, error, after
        self._calls = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._log, name)

    def transactional_writer(self, transactional_id: str, timeout_s: float = 60.0) -> TransactionalWriter:
        real, outer = self._log.transactional_writer(transactional_id, timeout_s), self

        class Writer:
            begin, abort, close = real.begin, real.abort, real.close

            def write(self, records: Sequence[Outgoing]) -> None:
                outer._step(lambda: real.write(records))

            def commit(
                self,
                group: str,
                offsets: Mapping[TopicPartition, int],
                timeout_s: float = 30.0,
                **more: object,
            ) -> None:
                outer._step(lambda: real.commit(group, offsets, timeout_s))

        return Writer()

    def _step(self, call: object) -> None:
        self._calls += 1
        dies = self._calls == self._at
        if dies and not self._after:
            raise self._error("no answer")
        call()  # type: ignore[operator]
        if dies:
            raise self._error("no answer")


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", range(1, 7))
@pytest.mark.parametrize("error", [TransactionUnknown, KeyboardInterrupt])
def test_every_letter_is_replayed_once_whenever_it_breaks_off(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], at: int, after: bool
) -> None:
    monkeypatch.setattr(settling, "BATCH_LETTERS", 2)
    log = new_log()
    for number in range(6):
        refuse(log, "rollouts", bytes([number]), "unknown_schema", partition=number % 4)
    chosen = dlq.read_letters(log).letters
    broken: Log = _Dying(log, at, error, after=after)  # type: ignore[assignment]
    try:
        settle(broken, "p.", chosen, REPLAY, ManualClock(now_us=NOW_US))
    except KeyboardInterrupt:  # the next one starts from what is pending
        pending = [one for one in dlq.read_letters(log).letters if one.state == "pending"]
        settle(log, "p.", pending, REPLAY, ManualClock(now_us=NOW_US + 1))
    values = sorted(r.value for r in records(log, "rollouts") if r.value is not None)
    assert values == sorted(bytes([number]) for number in range(6) for _ in range(2))
    assert {one.state for one in dlq.read_letters(log).letters} == {"replayed"}
    assert all(len(one.marks) == 1 for one in dlq.read_letters(log).letters)
    ledger = count_ledger(log, "p.")
    assert (ledger["dead-letters"].extra, ledger["rollouts"].extra) == (0, 0)


def test_a_broker_that_does_not_come_back_is_an_error() -> None:
    class Away(MemoryLog):
        def transactional_writer(self, transactional_id: str, timeout_s: float = 60.0) -> TransactionalWriter:
            raise LogUnavailable("away")

    log = Away({name: spec.partitions for name, spec in TOPICS.items()}, ManualClock(now_us=NOW_US))
    refuse(log, "rollouts", b"x", "unknown_schema")
    with pytest.raises(LogUnavailable, match="0 letters are replayed; then: away"):
        settle(log, "p.", dlq.read_letters(log).letters, REPLAY, ManualClock(now_us=NOW_US))


def test_two_at_once_the_second_fences_the_first() -> None:
    log = new_log()
    refuse(log, "rollouts", b"x", "unknown_schema")
    chosen = dlq.read_letters(log).letters

    def second(_: int) -> None:
        log.transactional_writer("p.dlq")

    with pytest.raises(Fenced):
        settle(log, "p.", chosen, REPLAY, ManualClock(now_us=NOW_US), second)
    assert len(records(log, "rollouts")) == 1


def test_the_ledger_sees_a_replay_without_its_copy_and_one_that_is_there_twice() -> None:
    log = new_log()
    refuse(log, "rollouts", b"x", "unknown_schema")
    torn = mark(Settlement("replayed", (LetterAt(0, 0),), "", "ada", NOW_US))
    log.writer().write([outgoing(torn, source="test", time_us=NOW_US)])
    assert count_ledger(log, "p.")["dead-letters"].extra_ids == ("0:0 replayed 1 times, 0 times there",)
    copy = Outgoing("rollouts", b"k", b"x", ((REPLAY_OF, b"0:0"), (REPLAY_COUNT, b"1")), 0)
    log.writer().write([copy])
    assert count_ledger(log, "p.")["dead-letters"].extra == 0
    log.writer().write([copy])
    assert count_ledger(log, "p.")["rollouts"].extra_ids == ("replay 1 of dead letter 0:0 again",)


def test_show_tells_everything() -> None:
    log = new_log()
    good = outgoing(
        synthetic.reward(synthetic.group_id(NOW_US, 1), 0, 1.0, at_us=NOW_US), source="test", time_us=NOW_US
    )
    refuse(log, "rewards", good.value, "late", key=good.key, headers=good.headers)
    settle(log, "p.", dlq.read_letters(log).letters, DROP, ManualClock(now_us=NOW_US))
    found = find(log, "assemble/rewards/0/0")
    assert found is not None
    assert find(log, "0:0") == found
    assert find(log, "0:7") is None
    marks = dlq.read_marks(log)[LetterAt(0, 0)]
    said = "\n".join(lines(*found, marks, str))
    assert "state        dropped" in said
    assert f"dropped {NOW_US} by ada: foreign" in said
    assert "rewards[0] at offset 0" in said
    assert ADVICE["late"] in said
    assert "c3 01" in said
    assert 'decodes: {"rollout_id":' in said


def test_show_of_what_does_not_decode() -> None:
    log = new_log()
    refuse(log, "rewards", b"hello", "not_framed")
    good = outgoing(
        synthetic.reward(synthetic.group_id(NOW_US, 1), 0, 1.0, at_us=NOW_US), source="test", time_us=NOW_US
    )
    refuse(log, "rewards", good.value, "header_mismatch", headers=())
    refuse(log, "rewards", None, "tombstone_not_allowed")
    said = ["\n".join(lines(*found, (), str)) for at in ("0:0", "0:1", "0:2") if (found := find(log, at))]
    assert "68 65 6c 6c 6f" in said[0]
    assert "does not decode: not_framed" in said[0]
    assert "does not decode: header_mismatch" in said[1]
    assert "its fields, unchecked: {" in said[1]
    assert "value        null" in said[2]


def test_what_killed_workers_is_shown_and_not_decoded() -> None:
    log = new_log()
    good = outgoing(
        synthetic.reward(synthetic.group_id(NOW_US, 1), 0, 1.0, at_us=NOW_US), source="test", time_us=NOW_US
    )
    refuse(log, "rewards", good.value, "kills_worker", key=good.key, headers=good.headers)
    found = find(log, "0:0")
    assert found is not None
    said = "\n".join(lines(*found, (), str))
    assert "c3 01" in said
    assert "not decoded: processes died of it" in said
    assert "decodes:" not in said
    (record,) = scan(log, ["dead-letters"])
    assert readable_record(record)["event"]["inner"]["refused"]["reason"] == "kills_worker"


def test_hex_is_cut_and_said() -> None:
    assert list(hex_lines(bytes(range(20)), 16)) == [
        "00000000  00 01 02 03 04 05 06 07 08 09 0a 0b 0c 0d 0e 0f  ................",
        "... 4 more bytes",
    ]


def test_marks_of_others_settle_nothing() -> None:
    good = mark(Settlement("dropped", (LetterAt(0, 1), LetterAt(0, 5)), "x", "ada", NOW_US))
    assert settlement_of(good) == Settlement("dropped", (LetterAt(0, 1), LetterAt(0, 5)), "x", "ada", NOW_US)
    log = new_log()
    refuse(log, "rollouts", b"x", "not_framed")
    letter = decode_record(records(log, "dead-letters")[0])
    assert isinstance(letter, DeadLetter)
    assert settlement_of(letter) is None
    for attributes in ({}, {"letters": "0-1"}):
        odd = type(good)(
            model="all", name=good.name, severity="info", text="", attributes=attributes, at_us=NOW_US
        )
        assert settlement_of(odd) is None


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answer", "agreed"), [("y\n", True), ("Yes\n", True), ("\n", False), ("n\n", False), ("", False)]
)
def test_only_a_yes_is_a_yes(monkeypatch: pytest.MonkeyPatch, answer: str, agreed: bool) -> None:
    log = new_log()
    refuse(log, "rollouts", b"x", "not_framed")
    monkeypatch.setattr("sys.stdin", _Terminal(answer))
    said = io.StringIO()
    console = Console(file=said, width=120)
    assert _confirmed(console, dlq.read_letters(log).letters, "dropped") is agreed
    assert said.getvalue() == "drop 1 dead letters? [y/N] "


def test_where_nobody_can_be_asked_yes_must_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with pytest.raises(ConfigError, match="--yes"):
        _confirmed(Console(file=io.StringIO()), (), "replayed")
