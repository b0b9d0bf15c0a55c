"""T3: clients write and read through our adapter while faults strike, and a checker reads their books.

A stack of its own, clients at a fixed rate, a fault every few seconds, final reads to the stable end of every partition.
Then the positive control: a client that breaks the rule of one doubt, one new producer, in the same surroundings. A run
proves something only if the control goes red.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from confluent_kafka import KafkaException

from rollwire.ops.chaos.history_book import Book, read_history
from rollwire.ops.chaos.history_check import NAMES, Finding, Op, Partition, check, count
from rollwire.ops.chaos.history_clients import Task, follow
from rollwire.ops.chaos.history_control import End, RuleBreaker, play_round
from rollwire.ops.chaos.history_faults import Clients, Kind, Nemesis, try_to_strike
from rollwire.ops.chaos.history_log import (
    ECHO,
    GROUP,
    PARTITIONS,
    SOURCE,
    Ends,
    last_offsets,
    read_out,
)
from rollwire.ops.chaos.proxy import KafkaProxy
from rollwire.ops.figures import Figure
from rollwire.ops.stack import StackConfig, StackInfo, running_stack
from rollwire.schemas.errors import DeadlineExceeded, RollwireError, StackError
from rollwire.streams.seams.log_kafka import KafkaLog

PRODUCERS: Final = 4
MEMBERS: Final = 2
_PRODUCERS_PART: Final = 0.7  # of all transactions; members, who take what there is, come to the rest
_PREFIX, _CONTROL_PREFIX = "history.", "control."
_CONTROL_ID: Final = "history.control"
_START_S: Final = 30.0
_END_S: Final = 60.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryOptions:
    seconds: float = 300.0
    every_s: float = 15.0
    control_s: float = 120.0
    per_second: float = 100.0  # transactions of all clients, about; each has up to four sends and polls
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Judged:
    """A history and what is wrong with it. `unfinished`: what the run itself did not come to; an error as well."""

    ops: int
    transactions: int
    findings: tuple[Finding, ...]
    unfinished: tuple[str, ...] = ()

    @property
    def errors(self) -> int:
        return len(self.findings) + len(self.unfinished)


@dataclass(frozen=True, slots=True)
class Outcome:
    main: Judged
    faults: tuple[Kind, ...]
    control: Judged
    rounds: int  # of the control, that were played to their end
    red: int  # of these, such that the checker named
    folder: Path | None  # where the books and logs are, if anything went wrong

    @property
    def ok(self) -> bool:
        return self.main.errors == 0 and bool(self.faults) and self.rounds > 0 and self.red == self.rounds


def run_history(options: HistoryOptions, say: Say) -> Outcome:
    """The whole run, in a folder of its own, which stays only if the outcome is not ok.

    Raises `StackError` where the stack does not start and `ClientDied` where a client ends by itself.
    """
    folder = Path(tempfile.mkdtemp(prefix="rollwire-history-"))
    keep = True
    try:
        with running_stack(folder, StackConfig(kafka_proxied=True)) as stack, _proxy(stack) as proxy:
            main, faults = _play(options, stack, proxy, folder, say)
            control, rounds, red = play_control(stack, proxy, folder / "control", options.control_s, say)
        outcome = Outcome(main, faults, control, rounds, red, folder)
        keep = not outcome.ok
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return outcome if keep else Outcome(main, faults, control, rounds, red, None)


def figures(outcome: Outcome) -> list[Figure]:
    """In the common form; names as `docs/operations.md` tells them."""
    counted = count(outcome.main.findings)
    values: dict[str, tuple[float, str]] = {
        "history.errors": (outcome.main.errors, "errors"),
        **{f"history.{name.replace('-', '_')}": (counted[name], "errors") for name in NAMES},
        "history.unfinished": (len(outcome.main.unfinished), "errors"),
        "history.ops": (outcome.main.ops, "operations"),
        "history.transactions": (outcome.main.transactions, "transactions"),
        "history.faults": (len(outcome.faults), "faults"),
        "history.control_errors": (len(outcome.control.findings), "errors"),
        "history.control_rounds": (outcome.rounds, "rounds"),
        "history.control_red": (outcome.red, "rounds"),
    }
    return [Figure(name=name, value=value, unit=unit) for name, (value, unit) in values.items()]


@contextmanager
def _proxy(stack: StackInfo) -> Iterator[KafkaProxy]:
    if stack.proxy_port is None or stack.proxied_port is None:
        raise StackError("the broker has no listener for a proxy")
    with KafkaProxy(stack.proxy_port, stack.proxied_port) as proxy:
        yield proxy


def _play(
    options: HistoryOptions, stack: StackInfo, proxy: KafkaProxy, folder: Path, say: Say
) -> tuple[Judged, tuple[Kind, ...]]:
    books = folder / "books"
    ends = Ends(stack.bootstrap, _PREFIX)
    ends.create()
    task = Task(
        role="producer",
        name="",
        number=0,
        bootstrap=proxy.bootstrap,
        prefix=_PREFIX,
        folder=str(books),
        per_second=options.per_second * _PRODUCERS_PART / PRODUCERS,
        seed=options.seed,
    )
    clients = Clients(task, folder / "clients")
    direct = KafkaLog(stack.bootstrap, _PREFIX, "history-reader")
    proxied = KafkaLog(proxy.bootstrap, _PREFIX, "history-proxied")
    stop = threading.Event()
    readers = [
        threading.Thread(target=follow, args=(log, Book(books, name), stop), daemon=True, name=name)
        for log, name in ((direct, "reader-direct"), (proxied, "reader-proxied"))
    ]
    nemesis = Nemesis(stack, proxy, clients, options.seed, stop)
    faults: list[Kind] = []
    try:
        for reader in readers:
            reader.start()
        producers = [f"producer-{n}" for n in range(1, PRODUCERS + 1)]
        members = [f"member-{n}" for n in range(1, MEMBERS + 1)]
        for name in producers:
            clients.start("producer", name)
        for name in members:
            clients.start("member", name)
        _wait(lambda: ends.written(ECHO) > 0, _START_S, "the first echo")
        began = time.monotonic()
        due = began + min(options.every_s, options.seconds / 2) / 2
        while time.monotonic() < began + options.seconds:
            clients.check()
            now = time.monotonic()
            if now < due:
                stop.wait(min(due - now, 0.2))
                continue
            due = max(due + options.every_s, now)
            struck = try_to_strike(nemesis)
            if struck is not None:
                faults.append(struck[0])
                say(f"{now - began:6.1f} s  {struck[0]:14} {struck[1]}")
        clients.check()
        clients.stop(producers)
        unfinished = await_answers(ends, direct)
        clients.stop(members)
        out = _read_all(ends, direct, Book(books, "final"), unfinished)
    finally:
        stop.set()
        clients.kill_all()
        for reader in readers:
            reader.join(_START_S)
    ops = read_history(books)
    return _judged(ops, out, (SOURCE,), unfinished), tuple(faults)


def play_control(
    stack: StackInfo, proxy: KafkaProxy, folder: Path, seconds: float, say: Say
) -> tuple[Judged, int, int]:
    """Rounds of the control until `seconds` are over, at least two; the history, how many rounds, and how many of them red."""
    ends = Ends(stack.bootstrap, _CONTROL_PREFIX)
    ends.create()
    log = KafkaLog(stack.bootstrap, _CONTROL_PREFIX, "history-control")
    book, shown = Book(folder, "breaker"), Book(folder, "reader")
    reader = log.reader()
    positions = dict.fromkeys(PARTITIONS, 0)
    reader.assign(positions)
    shown.assigned(positions)
    breaker = RuleBreaker(proxy.bootstrap, _CONTROL_PREFIX, _CONTROL_ID)
    unfinished: list[str] = []
    began, played, turn = time.monotonic(), list[int](), 0
    try:
        while time.monotonic() < began + seconds or turn < 2:
            turn += 1
            held: End = "commit" if turn % 2 else "abort"
            try:
                one = play_round(
                    breaker,
                    book,
                    shown,
                    proxy,
                    reader,
                    ends.written,
                    transactional_id=_CONTROL_ID,
                    value=turn * 10,
                    held=held,
                )
            except (DeadlineExceeded, KafkaException, RollwireError) as error:
                breaker.close()
                unfinished.append(f"round {turn} was not played to its end: {error}")
                continue
            played.append(turn)
            answer = "taken for its own" if one.answer == 0 else f"refused with code {one.answer}"
            say(f"{time.monotonic() - began:6.1f} s  control        {held} let go within the next transaction: {answer}")  # fmt: skip
    finally:
        breaker.close()
        reader.close()
    out = _read_all(ends, log, Book(folder, "final"), unfinished)
    ops = read_history(folder)
    judged = _judged(ops, out, (), unfinished)
    return judged, len(played), len(red_rounds(ops, judged.findings) & set(played))


def red_rounds(ops: Sequence[Op], findings: Sequence[Finding]) -> set[int]:
    """The rounds whose transactions the findings name."""
    rounds = {op.id: op.sends[0].value // 10 for op in ops if op.sends}
    return {rounds[op] for finding in findings for op in finding.ops if op in rounds}


def _judged(
    ops: list[Op], out: Sequence[Partition], answered: Sequence[str], unfinished: Sequence[str]
) -> Judged:
    transactions = sum(op.kind == "txn" for op in ops)
    polls = sum(op.kind == "poll" for op in ops)
    return Judged(transactions + polls, transactions, tuple(check(ops, out, answered)), tuple(unfinished))


def await_answers(ends: Ends, log: KafkaLog) -> list[str]:
    """Waits until the members have answered everything; what is left is said."""
    last = last_offsets(log, {p: end for p, end in ends.settled(log, _END_S).items() if p.topic == SOURCE})
    deadline = time.monotonic() + _END_S
    while True:
        committed = log.committed(GROUP, list(last))
        behind = [p for p, offset in last.items() if committed.get(p, 0) <= offset]
        if not behind:
            return []
        if time.monotonic() > deadline:
            return [
                f"{p.topic}[{p.partition}] was echoed to {committed.get(p, 0)} of {last[p]}" for p in behind
            ]
        time.sleep(0.1)


def _read_all(ends: Ends, log: KafkaLog, book: Book, unfinished: list[str]) -> list[Partition]:
    stable = ends.settled(log, _END_S)
    out = read_out(log, book, stable, _END_S)
    unfinished += [
        f"{p.topic}[{p.partition}] was not read to its end"
        for p in stable
        if (p.topic, p.partition) not in out
    ]
    return out


def _wait(true: Callable[[], bool], deadline_s: float, what: str) -> None:
    deadline = time.monotonic() + deadline_s
    while not true():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{what}: not within {deadline_s:g} s")
        time.sleep(0.05)
