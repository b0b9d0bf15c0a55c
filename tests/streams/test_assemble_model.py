"""assemble under arbitrary interleavings, repeats, poison, delays and crashes between any two effects.

The model is the step itself, fed once and undisturbed with whole topics one after the other. Whatever the live run went
through, each group must have exactly one outcome, and the same one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rollwire.schemas import records as r
from rollwire.schemas.errors import LogUnavailable, TransactionUnknown
from rollwire.streams import synthetic
from rollwire.streams.assemble import Assembler
from rollwire.streams.assemble_config import AssembleConfig
from rollwire.streams.emit import decode_record, outgoing, take
from rollwire.streams.runtime import Drive, RuntimeConfig, Session
from rollwire.streams.seams.clock import ManualClock
from rollwire.streams.seams.forwarding import ForwardingTransactions
from rollwire.streams.seams.log import Outgoing, Record, TopicPartition, TransactionalWriter
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan

CONFIG = AssembleConfig(group_deadline_s=10, late_horizon_s=40, grace_s=1)
TOPICS: dict[str, int] = dict.fromkeys(
    ("rollouts", "rewards", "routing-traces", "groups", "group-fates", "groups-closed", "dead-letters"), 1
)
SIZES = (1, 2, 3)
POINTS = ("begin", "write", "commit", "committed")


class CrashingWriter(ForwardingTransactions):
    """A transactional writer that dies at one of its effects; "committed" = the commit held, its answer was lost."""

    def __init__(self, inner: TransactionalWriter, crashes: list[str]) -> None:
        super().__init__(inner)
        self._crashes = crashes

    def _maybe(self, point: str) -> None:
        if self._crashes and self._crashes[0] == point:
            self._crashes.pop(0)
            raise TransactionUnknown(f"crash at {point}")

    def begin(self) -> None:
        self._maybe("begin")
        self._inner.begin()

    def write(self, records: Sequence[Outgoing]) -> None:
        self._inner.write(records)
        self._maybe("write")

    def commit(
        self,
        group: str,
        offsets: Mapping[TopicPartition, int],
        timeout_s: float = 30.0,
        *,
        also: Mapping[str, Mapping[TopicPartition, int]] | None = None,
    ) -> None:
        self._maybe("commit")
        self._inner.commit(group, offsets, timeout_s, also=also)
        self._maybe("committed")


class CrashingLog(MemoryLog):
    def __init__(self, clock: ManualClock) -> None:
        super().__init__(TOPICS, clock)
        self.crashes: list[str] = []

    def transactional_writer(self, transactional_id: str, timeout_s: float = 60.0) -> TransactionalWriter:
        return CrashingWriter(super().transactional_writer(transactional_id, timeout_s), self.crashes)


def outcomes(records: Sequence[Record | Outgoing]) -> dict[str, list[Any]]:
    """group -> what was said of it, without what depends on when it was said."""
    found: dict[str, list[Any]] = {}
    for record in records:
        event = decode_record(Record(record.topic, 0, 0, 0, record.key, record.value, record.headers))
        if isinstance(event, r.Group):
            found.setdefault(event.group_id, []).append(event.members)
        elif isinstance(event, r.GroupFate):
            fate = (event.fate, event.reason, event.members, event.reward_mean)
            found.setdefault(event.group_id, []).append(fate)
    return found


def refused(records: Sequence[Record | Outgoing]) -> dict[tuple[str, int], str]:
    """(topic, offset) of every refused event -> the reason."""
    found: dict[tuple[str, int], str] = {}
    for record in records:
        event = decode_record(Record(record.topic, 0, 0, 0, record.key, record.value, record.headers))
        if isinstance(event, r.DeadLetter):
            found[event.source.topic, event.source.offset] = event.reason
    return found


class Assembling(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.log = CrashingLog(self.clock)
        self.writer = self.log.writer()
        self.drive = Drive("t.assemble.0", "t.assemble", lambda: Assembler(0, CONFIG))
        self.session: Session | None = None
        self.groups: list[str] = []
        self.rewards: dict[tuple[str, int], float | None] = {}
        self.poison = 0

    def write(self, event: r.Event) -> None:
        record = outgoing(event, source="test", time_us=self.clock.now_us())
        self.writer.write([record._replace(partition=0)])

    @rule()
    def open_group(self) -> None:
        self.groups.append(synthetic.group_id(self.clock.now_us(), len(self.groups)))

    @rule(
        which=st.integers(0, 3),
        index=st.integers(0, 2),
        value=st.sampled_from([0.0, 1.0, None]),
        kinds=st.sets(st.sampled_from(["rollout", "reward", "trace"]), min_size=1),
        other=st.booleans(),
        abort=st.integers(0, 9),
    )
    def event(
        self, which: int, index: int, value: float | None, kinds: set[str], other: bool, abort: int
    ) -> None:
        """Writes events of one member of one of the latest groups; `other` makes a repeat a conflict."""
        if which >= len(self.groups):
            return
        number = len(self.groups) - 1 - which
        group, size = self.groups[number], SIZES[number % 3]
        for kind in sorted(kinds):
            if kind == "rollout" and index < size:
                reason: r.FinishReason = "abort" if abort == 0 else "stop"
                self.write(
                    synthetic.rollout(
                        group, index, size, at_us=1_767_225_600_000_000, seed=int(other), finish_reason=reason
                    )
                )
            elif kind == "reward":  # also for members that cannot be
                kept = self.rewards.setdefault((group, index), value)
                self.write(
                    synthetic.reward(group, index, value if other else kept, at_us=1_767_225_600_000_000)
                )
            elif kind == "trace":
                rows = 99 if other and abort == 1 else 15
                self.write(
                    synthetic.trace(group, index, at_us=1_767_225_600_000_000, shift=int(other), rows=rows)
                )

    @rule(topic=st.sampled_from(["rollouts", "rewards", "routing-traces"]))
    def write_poison(self, topic: str) -> None:
        self.writer.write([Outgoing(topic, b"k", b"poison", (), 0)])
        self.poison += 1

    @rule(seconds=st.sampled_from([0.001, 0.5, 4.0, 12.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(records=st.integers(1, 5))
    def turn(self, records: int) -> None:
        config = RuntimeConfig(linger_ms=0, idle_s=0, end_check_s=0, offsets_only_s=0, max_records=records)
        try:
            if self.session is None:
                self.session = Session(self.log, self.drive, config, self.clock)
            self.session.turn()
        except (TransactionUnknown, LogUnavailable):
            self.kill()

    @rule()
    def kill(self) -> None:
        if self.session is not None:
            self.session.close()
            self.session = None

    @rule(point=st.sampled_from(POINTS))
    def crash_soon(self, point: str) -> None:
        self.log.crashes.append(point)

    @invariant()
    def at_most_one_outcome(self) -> None:
        said = outcomes(list(scan(self.log, ["groups", "group-fates"])))
        assert all(len(what) == 1 for what in said.values()), said
        letters = Counter(
            (event.source.topic, event.source.offset)
            for record in scan(self.log, ["dead-letters"])
            if isinstance(event := decode_record(record), r.DeadLetter)
        )
        assert all(count == 1 for count in letters.values()), letters

    def teardown(self) -> None:
        self.log.crashes.clear()
        self.clock.advance(60)
        for _ in range(400):
            self.turn(5)
            if self.session is not None and not self.left():
                break
        self.turn(5)
        assert not self.left()
        self.at_most_one_outcome()
        said = self.undisturbed()
        assert outcomes(list(scan(self.log, ["groups", "group-fates"]))) == outcomes(said)
        live, wanted = refused(list(scan(self.log, ["dead-letters"]))), refused(said)
        assert sum(reason == "not_framed" for reason in live.values()) == self.poison
        # What is bad in itself is refused whenever it is read: for its own reason, or because it came too late.
        assert {at for at, reason in wanted.items() if reason != "late"} <= live.keys()
        assert {at for at, reason in live.items() if reason != "late"} <= wanted.keys()
        assert self.session is not None
        assert self.session.step.committable() == self.session.step.read()
        self.kill()

    def left(self) -> bool:
        """Whether there is something to read or to close."""
        if self.session is None:
            return True
        step = self.session.step
        assert isinstance(step, Assembler)
        return step.open_groups > 0 or step.read() != self.log.end_offsets(step.inputs)

    def undisturbed(self) -> list[Outgoing]:
        step = Assembler(0, CONFIG)
        step.start(dict.fromkeys(step.inputs, 0), {})
        said: list[Outgoing] = []
        for partition in reversed(step.inputs):
            said += step.feed([take(x) for x in scan(self.log, [partition.topic])], self.clock.now_us())
        said += step.tick(self.clock.now_us(), step.inputs)
        return said


TestAssembling = Assembling.TestCase
TestAssembling.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
