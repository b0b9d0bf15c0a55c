"""`rollwire audit ledger`: every topic's account by the hour, from archive, log and committed offsets alone."""

from __future__ import annotations

import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Final

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from rollwire.consumers.audit.hours import FLOWS, HOUR_MS, HourLedger, chosen, hour_name, hour_of
from rollwire.consumers.audit.hours_count import Told, count_hours
from rollwire.consumers.audit.hours_live import Counters, Written, compare, parse_counters
from rollwire.consumers.audit.hours_report import make_report
from rollwire.ops.auditing import JsonFile, auditing, conclude
from rollwire.ops.broker import DEFAULT_DIR, Bootstrap, Folder, Prefix, Registry
from rollwire.ops.commands.weights_access import Bucket
from rollwire.ops.history import open_history
from rollwire.ops.moments import moment_of
from rollwire.ops.printing import bars, console, table
from rollwire.schemas.catalogue import TOPICS, topic_named
from rollwire.schemas.errors import ConfigError, EnvironmentMissing
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.places import size_of

_ROWS: Final = 60  # of the table by hour; the JSON has all
_ASK_S: Final = 10.0
_NUMBERS: Final = ("received", "accepted", "refused", "shed", "pending", "gap")


def ledger(
    *,
    topic: tuple[str, ...] = (),
    since: Annotated[str | None, Parameter(name="--from")] = None,
    until: Annotated[str | None, Parameter(name="--to")] = None,
    metrics: tuple[str, ...] = (),
    key: Annotated[str | None, Parameter(env_var="ROLLWIRE_METRICS_KEY")] = None,
    json: JsonFile = None,
    bucket: Bucket = None,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    schema_registry: Registry = None,
) -> int:
    """Add up every topic by the hour: received = accepted + refused + shed + pending, and open = started - closed.

    It reads all topics from their beginning, in the archive where the log has them no more, and believes nobody else. An hour
    is that of the broker's timestamp, in UTC. Whatever is missing or too many is named by its event id and place.

    Parameters
    ----------
    topic
        Show these topics only. All are read: where an event went stands in others.
    since
        Show from this hour on, as in 2026-11-30T06; a time without a zone is UTC.
    until
        Show up to before this time; an hour that it cuts is shown whole.
    metrics
        Address of a running gateway's /metrics, or of another process that counts events: its counters must add up, and
        what a gateway acknowledged must be in the log. May be given for several.
    key
        API key with the scope metrics, where /metrics needs one.
    """
    with auditing():
        named = tuple(topic_named(one).name for one in topic)
        hours = _hour(since, "--from"), _hour(until, "--to", up=True)
        before = _counters(metrics, key)
        with (
            open_history(
                "audit-ledger",
                dir=dir,
                bootstrap=bootstrap,
                prefix=prefix,
                schema_registry=schema_registry,
                bucket=bucket,
            ) as past,
            _progress(past.log) as told,
        ):
            past.demand_run()
            written = Written(before)
            counted = count_hours(
                past.log, past.at.prefix, told=told, patchy=True, also=written.take if before else None
            )
        live = _counters(metrics, key)
        shown = chosen(counted.ledger, topics=named, since=hours[0] or "", until=hours[1] or "~")
        out = console()
        draw(out, shown)
        compared = compare(before, live, written.records) if before else None
        return conclude(make_report(counted, shown, live=live, compared=compared), json)


def draw(out: Console, shown: HourLedger) -> None:
    """By topic; by topic and hour, where these are not too many or not right; by flow."""
    by_topic: dict[str, Counter[str]] = {}
    for line in shown.lines:
        by_topic.setdefault(line.topic, Counter()).update({name: getattr(line, name) for name in _NUMBERS})
    out.print(_table(("topic",), [((topic,), numbers) for topic, numbers in by_topic.items()]))
    hours = {line.hour for line in shown.lines}
    lines = [line for line in shown.lines if line.gap or len(shown.lines) <= _ROWS]
    if len(hours) > 1 and lines:
        rows = [
            ((line.topic, line.hour), Counter({name: getattr(line, name) for name in _NUMBERS}))
            for line in lines[:_ROWS]
        ]
        out.print()
        out.print(_table(("topic", "hour (UTC)"), rows))
    if len(lines) < len(shown.lines) or len(lines) > _ROWS:
        out.print(f"{len(shown.lines):,} topics and hours in all: --json has each")
    if shown.flows:
        out.print()
        out.print(_flows(shown))


def _table(names: Sequence[str], rows: Sequence[tuple[tuple[str, ...], Counter[str]]]) -> Table:
    drawn = table(*names, *_NUMBERS, right=_NUMBERS)
    for heads, numbers in rows:
        drawn.add_row(*heads, *(f"{numbers[name]:,}" for name in _NUMBERS))
    return drawn


def _flows(shown: HourLedger) -> Table:
    counts = ("started", "closed", "open", "gap")
    drawn = table("flow", *counts, "", right=counts)
    for flow, meaning in FLOWS.items():
        hours = [one for one in shown.flows if one.flow == flow]
        if hours:
            numbers = (
                sum(one.started for one in hours),
                sum(one.closed for one in hours),
                hours[-1].open,
                sum(one.lost + one.unstarted for one in hours),
            )
            drawn.add_row(flow, *(f"{number:,}" for number in numbers), meaning)
    return drawn


def _hour(text: str | None, option: str, *, up: bool = False) -> str | None:
    """The hour of a time, as hours are named; `up`: of one that is no whole hour, the next one."""
    if text is None:
        return None
    at_ms = round(moment_of(text, option).timestamp() * 1_000)
    return hour_name(hour_of(at_ms + HOUR_MS - 1 if up else at_ms))


def _counters(urls: Sequence[str], key: str | None) -> tuple[Counters, ...]:
    return tuple(one for url in urls for one in parse_counters(url, _ask(url, key)))


def _ask(url: str, key: str | None) -> str:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--metrics {url}: not an http address")
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=_ASK_S) as answer:
            return str(answer.read(), "utf-8", "replace")
    except OSError as error:
        raise EnvironmentMissing(f"--metrics {url}: {error}") from error


@contextmanager
def _progress(log: Log) -> Iterator[Told]:
    """A bar of records, on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with bars(*columns) as progress:
        line = progress.add_task("records", total=size_of(log, TOPICS))
        yield lambda topic, more: progress.update(line, advance=more, description=topic)
