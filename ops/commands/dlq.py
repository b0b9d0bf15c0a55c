"""`rollwire dlq list | show | replay | drop`: what was refused, and what becomes of it.

Exit codes: 0 done; 1 nothing matched, or some letters could not be replayed; 2 wrong use.
"""

from __future__ import annotations

import getpass
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from rollwire.ops.broker import DEFAULT_DIR, Bootstrap, Broker, Folder, Prefix, Registry, broker
from rollwire.ops.dlq import letters as dlq
from rollwire.ops.dlq.settle import Order, Outcome, flaw, settle
from rollwire.ops.dlq.show import find, lines
from rollwire.ops.looking import Looking
from rollwire.ops.readable import json_line, raw
from rollwire.schemas.advice import ADVICE
from rollwire.schemas.errors import ConfigError
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.settlement import Action

app = App(
    name="dlq",
    help="Dead letters: list, show, replay and drop what was refused.",
    result_action="return_value",
)

# A transaction that is left open by a kill -9 holds readers back no longer than this.
_TRANSACTION_TIMEOUT_S = 15.0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Filters:
    """Which letters are meant; all conditions must hold.

    Attributes
    ----------
    reason
        Reason codes; may be given several times.
    topic
        Source topics, without the prefix; may be given several times.
    partition
        The source partition.
    offset
        The source offset.
    since
        Refused at or after: 2026-01-31T12:00, or 90s, 15m, 2h, 3d ago.
    until
        Refused before that.
    refused_by
        Who refused it: assemble, pack, verifier, ...
    key
        The record's key: text, or hex:...
    """

    reason: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = ()
    topic: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = ()
    partition: int | None = None
    offset: int | None = None
    since: str | None = None
    until: str | None = None
    refused_by: str | None = None
    key: str | None = None

    def where(self, names: tuple[str, ...], states: tuple[dlq.State, ...]) -> dlq.Where:
        """Raises `ConfigError`."""
        now_us = SystemClock().now_us()
        asked = dlq.Where(
            reasons=self.reason,
            topics=self.topic,
            partition=self.partition,
            offset=self.offset,
            since_us=None if self.since is None else dlq.parse_time(self.since, now_us),
            until_us=None if self.until is None else dlq.parse_time(self.until, now_us),
            refused_by=self.refused_by,
            key=None if self.key is None else dlq.parse_key(self.key),
            names=names,
            states=states,
        )
        dlq.check(asked)
        return asked


_ALL = Filters()


@app.command(name="list")
def list_(
    *,
    filters: Filters = _ALL,
    state: Annotated[tuple[dlq.State, ...], Parameter(negative=(), show_default=False)] = (),
    each: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    schema_registry: Registry = None,
) -> int:
    """Count dead letters by reason and source topic. Exit code 1 where none matched.

    `rollwire dlq list --topic rewards --since 2h --state pending` counts what of the last two hours is to be done;
    --each names the letters.

    Parameters
    ----------
    state
        Only letters that are pending, replayed or dropped; may be given several times.
    each
        One line a letter.
    json
        One JSON object a letter.
    """
    asked = filters.where((), state)
    with _open(broker(dir, bootstrap, prefix, schema_registry)) as log:
        read = dlq.read_letters(log)
    found = [letter for letter in read.letters if dlq.fits(letter, asked)]
    if json:
        for letter in found:
            sys.stdout.write(json_line(_plain(letter)) + "\n")
        return 0 if found else 1
    _warn_foreign(read)
    out = _console()
    if not found:
        out.print("no dead letter matches" if read.letters else "there are no dead letters")
        return 1
    out.print(_each(found) if each else _summary(found))
    return 0


@app.command
def show(
    letter: str,
    /,
    *,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    schema_registry: Registry = None,
) -> int:
    """Show one dead letter whole: source, headers, bytes, what they decode to, and what to do.

    Parameters
    ----------
    letter
        Its position in dead-letters as partition:offset (0:17), or its id (assemble/rollouts/2/43).
    """
    with _open(broker(dir, bootstrap, prefix, schema_registry)) as log:
        found = find(log, letter)
        if found is None:
            _console().print(f"there is no dead letter {letter}: `rollwire dlq list --each` names them")
            return 1
        marks = dlq.read_marks(log).get(found[0].at, ())
        for line in lines(*found, marks, _time, Looking(log)):
            sys.stdout.write(line + "\n")
    return 0


@app.command
def replay(
    letters: Annotated[tuple[str, ...], Parameter(show_default=False)] = (),
    /,
    *,
    filters: Filters = _ALL,
    again: Annotated[bool, Parameter(negative=())] = False,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative=())] = False,
    why: str = "",
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    schema_registry: Registry = None,
) -> int:
    """Write refused records back to their source topics, as they were, exactly once.

    It says what it would do, and asks. `rollwire dlq replay --reason unknown_schema --dry-run` only says it;
    `rollwire dlq replay 0:17 --yes` does it. What cannot be replayed is named, and the exit code is 1: a letter that was
    cut, a record that is too large for its topic, a group that has its fate. A
    replayed letter is no longer pending.

    Parameters
    ----------
    letters
        Positions (0:17) or ids; without any, the filters choose among all that are pending.
    again
        Also letters that were replayed or dropped before.
    dry_run
        Say what would be written, and write nothing.
    yes
        Do not ask.
    why
        A word for the record, kept with the mark.
    """
    at = broker(dir, bootstrap, prefix, schema_registry)
    asked = filters.where(letters, () if again else ("pending",))
    return _settle(at, asked, Order("replayed", why, _user()), dry_run=dry_run, yes=yes)


@app.command
def drop(
    letters: Annotated[tuple[str, ...], Parameter(show_default=False)] = (),
    /,
    *,
    why: str,
    filters: Filters = _ALL,
    again: Annotated[bool, Parameter(negative=())] = False,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative=())] = False,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    schema_registry: Registry = None,
) -> int:
    """Mark dead letters as dropped: they are no longer pending. They stay readable until their retention ends.

    It says what it would do, and asks: `rollwire dlq drop --reason late --why "the fleet was away"`.

    Parameters
    ----------
    letters
        Positions (0:17) or ids; without any, the filters choose among all that are pending.
    why
        The reason, kept with the mark.
    again
        Also letters that were replayed or dropped before.
    dry_run
        Say what would be marked, and mark nothing.
    yes
        Do not ask.
    """
    if not why.strip():
        raise ConfigError("--why is empty: say why these letters are dropped")
    at = broker(dir, bootstrap, prefix, schema_registry)
    asked = filters.where(letters, () if again else ("pending",))
    return _settle(at, asked, Order("dropped", why, _user()), dry_run=dry_run, yes=yes)


def _settle(at: Broker, asked: dlq.Where, order: Order, *, dry_run: bool, yes: bool) -> int:
    console = Console(stderr=True, highlight=False)
    with _open(at) as log:
        read = dlq.read_letters(log)
        chosen = [letter for letter in read.letters if dlq.fits(letter, asked)]
        if not chosen:
            settled = asked._replace(states=())
            before = sum(dlq.fits(letter, settled) for letter in read.letters)
            more = f"; {before:,} that match were settled before (--again takes them too)" if before else ""
            console.print(f"no pending dead letter matches{more}")
            return 1
        _console().print(_plan(chosen, order.action))
        if dry_run:
            console.print(f"dry run: {dlq.past(order.action, len(chosen))} by this; nothing was written")
            return 0
        if not yes and not _confirmed(console, chosen, order.action):
            console.print("nothing was written")
            return 1
        outcome = _run(log, at, chosen, order, console)
    for failure in outcome.failures:
        console.print(f"{failure.at} was not {order.action}: {failure.why}")
    console.print(dlq.past(order.action, outcome.settled))
    return 1 if outcome.failures else 0


def _run(log: KafkaLog, at: Broker, chosen: Sequence[dlq.Letter], order: Order, console: Console) -> Outcome:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(order.action, total=len(chosen))
        return settle(
            log, at.prefix, chosen, order, SystemClock(), lambda done: bar.update(task, completed=done)
        )


def _confirmed(console: Console, chosen: Sequence[dlq.Letter], action: Action) -> bool:
    verb = "replay" if action == "replayed" else "drop"
    if not sys.stdin.isatty():
        raise ConfigError(f"nobody can be asked here: give --yes to {verb} {len(chosen):,} dead letters")
    console.print(f"{verb} {len(chosen):,} dead letters? [y/N] ", end="", markup=False)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


@contextmanager
def _open(at: Broker) -> Iterator[KafkaLog]:
    log = KafkaLog(
        at.bootstrap, at.prefix, client_id="rollwire-dlq", transaction_timeout_s=_TRANSACTION_TIMEOUT_S
    )
    try:
        yield log
    finally:
        log.close()


def _plain(letter: dlq.Letter) -> dict[str, Any]:
    source = letter.source
    return {
        "letter": str(letter.at),
        "id": letter.id,
        "state": letter.state,
        "reason": letter.reason,
        "detail": letter.detail,
        "topic": source.topic,
        "partition": source.partition,
        "offset": source.offset,
        "key": raw(letter.key),
        "value_bytes": letter.value_bytes,
        "refused_by": letter.refused_by,
        "refused": _time(letter.refused_us),
        "refusals": letter.replays + 1,
        "do": ADVICE.get(letter.reason, ""),
    }


def _summary(found: Sequence[dlq.Letter]) -> Table:
    table = _table("reason", "topic", "pending", "replayed", "dropped", "oldest", "newest", "do")
    for row in dlq.table(found):
        counts = [f"{row.counts[state]:,}" for state in dlq.STATES]
        times = (_time(row.oldest_us), _time(row.newest_us))
        table.add_row(row.reason, row.topic, *counts, *times, ADVICE.get(row.reason, ""))
    return table


def _each(found: Sequence[dlq.Letter]) -> Table:
    table = _table("letter", "state", "reason", "source", "key", "refused", "by", "times", "detail")
    for one in found:
        source = f"{one.source.topic}[{one.source.partition}]:{one.source.offset}"
        table.add_row(
            str(one.at), one.state, one.reason, source, (raw(one.key) or "null")[:60], _time(one.refused_us),
            one.refused_by, str(one.replays + 1), one.detail[:200],
        )  # fmt: skip
    return table


def _plan(chosen: Sequence[dlq.Letter], action: Action) -> Table:
    """What would be done, by reason and topic."""
    table = _table("reason", "topic", "letters", "not possible", "do")
    for row in dlq.table(chosen):
        members = [one for one in chosen if (one.reason, one.source.topic) == (row.reason, row.topic)]
        not_possible = sum(flaw(one) is not None for one in members) if action == "replayed" else 0
        table.add_row(
            row.reason, row.topic, f"{len(members):,}", f"{not_possible:,}", ADVICE.get(row.reason, "")
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        number = column in {"pending", "replayed", "dropped", "letters", "not possible", "times"}
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def _warn_foreign(read: dlq.Letters) -> None:
    if read.foreign:
        Console(stderr=True, highlight=False).print(
            f"{read.foreign:,} records of dead-letters are no dead letters: `rollwire cat dead-letters` shows them"
        )


def _console() -> Console:
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)


def _time(us: int) -> str:
    return datetime.fromtimestamp(us / 1e6, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # no name for this uid
        return "unknown"
