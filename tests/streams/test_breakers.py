"""A stream that is all refusals halts; a record that kills its worker is set aside, and nothing else is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import pytest

from rollwire.schemas.errors import CircuitOpen, LogUnavailable, Refused
from rollwire.schemas.records import DeadLetter
from rollwire.streams.breakers import Circuit, Note, parse_note
from rollwire.streams.dead_letter import dead_letter
from rollwire.streams.emit import decode_record
from rollwire.streams.runtime import Drive, RuntimeConfig, Session, read_group
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.log import Outgoing, Record, TopicPartition
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.step import Memory, Taken

IN = TopicPartition("in", 0)
CONFIG = RuntimeConfig(
    linger_ms=0,
    idle_s=0,
    offsets_only_s=0,
    max_records=500,
    max_refused_run=20,
    max_refused_share=0.5,
    refused_window=100,
)


class Killed(BaseException):
    """The process died."""


class Keep:
    """Copies what decodes to `out`; keeps its first record open if told so, so that all is read again."""

    memories: tuple[Memory, ...] = ()
    inputs = (IN,)

    def __init__(self, *, hold: bool = False) -> None:
        self._hold = hold
        self._start = self._next = self._decided = 0

    def restore(self, taken: Taken) -> None:
        raise LookupError("it has no memories")

    def start(self, committed: Mapping[TopicPartition, int], read: Mapping[TopicPartition, int]) -> None:
        self._start = self._next = committed[IN]
        self._decided = read.get(IN, 0)

    def feed(self, taken: Sequence[Taken], clock_us: int) -> list[Outgoing]:
        outputs: list[Outgoing] = []
        for record, event in taken:
            self._next = record.offset + 1
            if record.offset < self._decided:
                continue
            if isinstance(event, Refused):
                outputs.append(dead_letter(record, event, refused_by="test", time_us=clock_us))
            else:
                outputs.append(Outgoing("out", record.key, record.value))
        return outputs

    def tick(self, clock_us: int, at_end: Collection[TopicPartition]) -> list[Outgoing]:
        return []

    def due_us(self) -> int | None:
        return None

    def paused(self) -> Collection[TopicPartition]:
        return ()

    def read(self) -> dict[TopicPartition, int]:
        return {IN: max(self._next, self._decided)}

    def committable(self) -> dict[TopicPartition, int]:
        return {IN: self._start if self._hold else self._next}


class Bench:
    def __init__(self, *, hold: bool = False) -> None:
        self.clock = ManualClock()
        self.log = MemoryLog({"in": 1, "out": 1, "dead-letters": 1}, self.clock)
        self.hold = hold
        self.decoded: list[bytes | None] = []
        self.lives = 0
        self.away = False

    def put(self, *values: bytes) -> None:
        self.log.writer().write([Outgoing("in", b"k", value) for value in values])

    def take(self, record: Record) -> Taken:
        if self.away:
            raise LogUnavailable("no schema registry")
        self.decoded.append(record.value)
        if record.value is not None and record.value.startswith(b"deadly"):
            raise Killed
        if record.value is not None and record.value.startswith(b"bad"):
            return Taken(record, Refused("malformed", "no event"))
        if record.value is not None and record.value.startswith(b"late"):
            return Taken(record, Refused("late", "too late"))
        return Taken(record, None)

    def session(self, life: str | None = None, config: RuntimeConfig = CONFIG) -> Session:
        self.lives += 1
        drive = Drive("t", "t", lambda: Keep(hold=self.hold), self.take)
        return Session(self.log, drive, config, self.clock, life=life or f"life-{self.lives}")

    def live(self, life: str | None = None, config: RuntimeConfig = CONFIG) -> bool:
        """A process from its start to the end of the log, or to its death; whether it lived on."""
        session: Session | None = None
        try:
            session = self.session(life, config)
            while session.turn():
                continue
            return True
        except Killed:
            return False
        finally:
            if session is not None:
                session.close()

    @property
    def out(self) -> list[bytes | None]:
        return [record.value for record in scan(self.log, ["out"])]

    @property
    def letters(self) -> list[tuple[bytes | None, str]]:
        found = [decode_record(record) for record in scan(self.log, ["dead-letters"])]
        return [(letter.value, letter.reason) for letter in found if isinstance(letter, DeadLetter)]


def numbers(count: int, start: int = 0) -> list[bytes]:
    return [b"%d" % n for n in range(start, start + count)]


def test_a_run_of_refusals_halts_before_its_batch_is_committed() -> None:
    bench = Bench()
    bench.put(*numbers(5), *[b"bad"] * 20, *numbers(5))
    session = bench.session()
    with pytest.raises(
        CircuitOpen, match=r"20 records in a row.*20 malformed.*in\[0\] at 5 to in\[0\] at 24"
    ):
        session.turn()
    session.close()
    assert bench.out == []
    assert bench.letters == []
    assert bench.log.committed("t", [IN]) == {}


def test_a_run_shorter_than_that_goes_to_the_dead_letters() -> None:
    bench = Bench()
    bench.put(*[b"bad"] * 19, b"good", *[b"bad"] * 19, *numbers(80))
    assert bench.live()
    assert len(bench.letters) == 38
    assert len(bench.out) == 81


def test_a_run_counts_over_batches_and_a_restart_does_not_drain_on() -> None:
    """What opened stays open: a supervisor that restarts the process drains one run, not one a restart."""
    bench = Bench()
    small = CONFIG.model_copy(update={"max_records": 8})
    bench.put(*numbers(80), *[b"bad"] * 400)
    for _ in range(5):
        with pytest.raises(CircuitOpen):
            bench.live(config=small)
    assert len(bench.letters) == 16  # two batches below the limit of 20
    assert len(bench.out) == 80


def test_it_closes_when_a_record_is_taken_well() -> None:
    bench = Bench()
    bench.put(*[b"bad"] * 25)
    with pytest.raises(CircuitOpen):
        bench.live()
    bench.log.trim(IN, 20)
    bench.log.set_committed("t", IN, 20)
    bench.log.set_committed(read_group("t"), IN, 20)  # an administrator moved on
    bench.put(b"good", *[b"bad"] * 10, b"good")
    assert bench.live()
    assert len(bench.letters) == 15


def test_a_large_share_halts_too() -> None:
    bench = Bench()
    bench.put(*([b"bad", b"bad", b"good"] * 40))
    with pytest.raises(CircuitOpen, match=r"of the last \d+ records were refused"):
        bench.live()
    assert bench.letters == []


def test_a_share_below_the_limit_does_not() -> None:
    bench = Bench()
    bench.put(*([b"bad", b"good"] * 200))
    assert bench.live()
    assert len(bench.letters) == 200


def test_what_comes_late_in_bulk_halts_nothing() -> None:
    bench = Bench()
    bench.put(*[b"late"] * 300, *[b"bad"] * 3, *[b"late"] * 300)
    assert bench.live()
    assert len(bench.letters) == 603


def test_a_circuit_that_is_switched_off_drains() -> None:
    bench = Bench()
    bench.put(*[b"bad"] * 300)
    assert bench.live(config=CONFIG.model_copy(update={"max_refused_run": 0, "max_refused_share": 0.0}))
    assert len(bench.letters) == 300


def test_an_idle_circuit_counts_nothing() -> None:
    circuit = Circuit(run=2, share=0.5, window=4)
    for _ in range(10):
        circuit.check([], [])


@pytest.mark.parametrize("hold", [False, True])
def test_a_record_that_kills_its_worker_is_set_aside_and_its_neighbours_pass(hold: bool) -> None:
    bench = Bench(hold=hold)
    bench.put(*numbers(300), b"deadly", *numbers(300, 300))
    deaths = 0
    while not bench.live():
        deaths += 1
        assert deaths < 10
    assert deaths == 3  # with its neighbours, then alone, twice
    assert sorted(bench.out, key=lambda v: int(v or b"")) == numbers(600)
    assert bench.letters == [(b"deadly", "kills_worker")]
    assert bench.decoded.count(b"deadly") == 3
    # Nor does a later life decode it, where it is read again.
    assert bench.live()
    bench.put(b"more")
    assert bench.live()
    assert bench.decoded.count(b"deadly") == 3
    assert bench.letters == [(b"deadly", "kills_worker")]
    assert bench.out[-1] == b"more"


def test_two_that_kill_are_both_set_aside() -> None:
    bench = Bench(hold=True)
    bench.put(b"deadly 1", *numbers(10), b"deadly 2", *numbers(10, 10))
    deaths = 0
    while not bench.live():
        deaths += 1
        assert deaths < 20
    assert [value for value, _ in bench.letters] == [b"deadly 1", b"deadly 2"]
    assert sorted(bench.out, key=lambda v: int(v or b"")) == numbers(20)
    decoded = len([value for value in bench.decoded if (value or b"").startswith(b"deadly")])
    assert bench.live()
    assert bench.live()
    assert len([value for value in bench.decoded if (value or b"").startswith(b"deadly")]) == decoded


def test_one_that_kills_far_behind_the_start_is_found_all_the_same() -> None:
    bench = Bench()
    assert bench.live()
    bench.put(*numbers(2_500), b"deadly", *numbers(10))
    deaths = 0
    while not bench.live():
        deaths += 1
        assert deaths < 10
    assert bench.letters == [(b"deadly", "kills_worker")]
    assert len(bench.out) == 2_510


def test_processes_that_are_killed_from_outside_lose_no_record() -> None:
    """Deaths at places that move say nothing of any record."""
    bench = Bench()
    bench.put(*numbers(1_000))
    for _ in range(20):
        bench.session().turn()  # then it is killed: nothing is closed, nothing settled
    assert bench.live()
    assert bench.letters == []
    assert sorted(bench.out, key=lambda v: int(v or b"")) == numbers(1_000)


def test_a_session_that_ends_without_its_process_is_no_death() -> None:
    bench = Bench()
    bench.put(*numbers(3))
    bench.away = True
    for _ in range(10):
        with pytest.raises(LogUnavailable):
            bench.live("the same")
    bench.away = False
    assert bench.live("the same")
    assert bench.letters == []
    assert bench.out == numbers(3)


def test_switched_off_it_notes_nothing() -> None:
    bench = Bench()
    bench.put(*numbers(10))
    assert bench.live(config=CONFIG.model_copy(update={"deaths": 0}))
    assert (
        bench.log.end_offsets([TopicPartition("out", 0)])[TopicPartition("out", 0)] == 11
    )  # one transaction


@pytest.mark.parametrize("text", ["", "x", "a 1 2 3", "a b c d e f g", "- 1 2 0 0 0 1,x"])
def test_a_note_that_is_not_ours_says_nothing(text: str) -> None:
    assert parse_note(text).first == -1


def test_notes_come_back() -> None:
    for note in (
        Note("life", 3, 9, False, 0, ()),
        Note("", 3, 3, True, 2, (1, 3)),
        Note("x", 0, 0, False, 0, (), True),
    ):
        assert parse_note(note.text()) == note
