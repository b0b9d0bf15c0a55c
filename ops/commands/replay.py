"""`rollwire replay`: processors run over a history once more, with changed settings, into topics of their own."""

from __future__ import annotations

import json as json_
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from rollwire.ops.auditing import JsonFile
from rollwire.ops.broker import DEFAULT_DIR, Bootstrap, Folder, Prefix, Registry, broker
from rollwire.ops.logs import configure_logging
from rollwire.ops.moments import moment_of
from rollwire.ops.printing import console, table, write_json
from rollwire.ops.replay.progress import progress
from rollwire.ops.replay.shadow import LiveLogs, announce_replay, make_shadow
from rollwire.schemas.errors import ConfigError
from rollwire.schemas.rules import Rules, parse_rules
from rollwire.streams.replay.settings import SECTIONS, read_spoken
from rollwire.streams.replay.whatif import Replayed, planned_whatif
from rollwire.streams.replay.whatif import replay as run
from rollwire.streams.replay.window import EVER_US, Window

_RULES = "rules"


def replay(
    *processors: str,
    into: str,
    start: Annotated[str | None, Parameter(name="--from")] = None,
    end: Annotated[str | None, Parameter(name="--to")] = None,
    set_: Annotated[tuple[str, ...], Parameter(name="--set", negative=())] = (),
    workers: int = 1,
    real_time: Annotated[bool, Parameter(negative=())] = False,
    lineage: str | None = None,
    json: JsonFile = None,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    schema_registry: Registry = None,
) -> None:
    """Run processors over a history once more, with changed settings (what if?), into shadow topics.

    Inputs are merged by the broker's timestamp, and that is the clock: any number of workers, any time zone, the same outcome.
    Weight versions, rollouts and feedback are the history's. `rollwire audit diff` compares the outcome with another one.

    Parameters
    ----------
    processors
        attribute, assemble, assemble-production, pack. What one of them writes is read by those behind it.
    into
        Prefix of the topics that it writes; they are created, and must be empty.
    start
        Only groups opened from this moment on (2026-11-30T06:00, UTC unless it says otherwise), or records from this offset of
        each partition on.
    end
        End at this moment, or before this offset of each partition; what is open then stays open.
    set_
        section.key=value, as in `--set pack.max_lag_versions=2 --set assemble.baseline=leave_one_out`; `--set rules=FILE`: what
        feedback is worth.
    workers
        Processes that share the partitions out.
    real_time
        Write as fast as it happened then, not as fast as it goes.
    lineage
        Whose plans are made, where the topics hold several.
    """
    configure_logging("warning")  # each plan of a processor that runs live is a line of its log
    changes, rules = changes_of(set_)
    at = broker(dir, bootstrap, prefix, schema_registry)
    logs = LiveLogs(dir, bootstrap, prefix, schema_registry, into)
    with logs() as opened:
        what = planned_whatif(
            processors,
            read_spoken(opened.history, changes),
            window_of(start, end),
            rules=rules,
            lineage=lineage,
        )
        check_changes(changes, what.processors)
        make_shadow(at.bootstrap, at.prefix, into, opened.history)
        announce_replay(opened.shadow, what, at.prefix, set_)
    with progress() as told:
        done = run(
            what,
            logs,
            workers=workers,
            pace=_pace() if real_time else None,
            seen=lambda made: told("written", made.at_us),
        )
    write_json(json, done)
    _show(done, into)


def _show(done: Replayed, into: str) -> None:
    rows = table("topic", "records", "digest", right=("records",))
    for topic, count in done.written.items():
        rows.add_row(f"{into}{topic}", f"{count:,}", done.digests[topic])
    out = console()
    out.print(rows)
    if "pack" in done.processors:
        out.print(
            f"{done.waiting:,} groups wait for a plan at the end; {done.unplanned:,} versions of the history came without one"
        )


def changes_of(given: Sequence[str]) -> tuple[dict[str, Any], Rules | None]:
    """Settings by dotted name, values read as JSON where they are JSON; and the rules. Raises `ConfigError`."""
    changes: dict[str, Any] = {}
    rules: Rules | None = None
    for one in given:
        name, equals, raw = one.partition("=")
        if not equals or not name:
            raise ConfigError(f"{one!r} is not of the form key=value, as in pack.max_lag_versions=2")
        if name == _RULES:
            try:
                rules = parse_rules(Path(raw).read_text("utf-8"), raw)
            except OSError as error:
                raise ConfigError(f"--set rules={raw}: {error}") from error
            continue
        if name.split(".")[0] not in SECTIONS.values() or "." not in name:
            raise ConfigError(
                f"--set {name}: what is replayed has settings in {', '.join(sorted(SECTIONS.values()))}, as in "
                "pack.max_lag_versions; and `rules`"
            )
        try:
            changes[name] = json_.loads(raw)
        except ValueError:
            changes[name] = raw
    return changes, rules


def check_changes(changes: Iterable[str], processors: Iterable[str]) -> None:
    """Raises `ConfigError` for a setting of nobody who is replayed: it would change nothing, and the answer would be taken for
    its effect."""
    sections = {SECTIONS[name] for name in processors if name in SECTIONS}
    for name in changes:
        if name.split(".")[0] not in sections:
            of = next(one for one, section in SECTIONS.items() if section == name.split(".")[0])
            raise ConfigError(f"--set {name}: {of} is not replayed; name it as well")


def window_of(start: str | None, end: str | None) -> Window:
    """Of times or offsets as people write them. Raises `ConfigError`."""
    window = Window()
    if start is not None:
        window = (
            window._replace(from_offset=int(start))
            if start.isdecimal()
            else window._replace(from_us=_us(start))
        )
    if end is not None:
        window = window._replace(to_offset=int(end)) if end.isdecimal() else window._replace(to_us=_us(end))
    if window.from_us >= window.to_us or window.from_offset >= window.to_offset:
        raise ConfigError(f"--from {start} is not before --to {end}")
    return window


def _us(text: str) -> int:
    at_us = round(moment_of(text, also=", or an offset").timestamp() * 1e6)
    if not 0 <= at_us < EVER_US:
        raise ConfigError(f"{text!r} is out of range")
    return at_us


def _pace() -> Callable[[int], None]:
    """Waits until as much time has passed since the first record as had passed then."""
    began: list[float] = []
    stopped = threading.Event()

    def wait(at_us: int) -> None:
        if not began:
            began.append(time.monotonic() - at_us / 1e6)
        left_s = at_us / 1e6 + began[0] - time.monotonic()
        if left_s > 0:
            stopped.wait(left_s)

    return wait
