"""`rollwire erase` and `rollwire subject export`: what a person may ask for.

Exit codes: 0 done; 1 nothing of the person is known, or not all was done; 2 wrong use.
"""

from __future__ import annotations

import getpass
import os
import secrets
import sys
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from rollwire.consumers.audit.versions import ranges
from rollwire.ops.broker import DEFAULT_DIR, Bootstrap, Folder, Prefix, Registry
from rollwire.ops.erase.erase import Done, Request
from rollwire.ops.erase.erase import erase as erase_person
from rollwire.ops.erase.export import export as export_person
from rollwire.ops.erase.reach import Reach, trace
from rollwire.ops.history import open_history
from rollwire.ops.keys import open_keys
from rollwire.ops.looking import Looking
from rollwire.ops.person import Pseudonym, Subject, Tenant, person_of
from rollwire.ops.stack import read_stack
from rollwire.producers.environments.known import make_environment
from rollwire.schemas.errors import ConfigError
from rollwire.schemas.ids import new_group_id
from rollwire.schemas.records import ProductionRollout
from rollwire.streams.seams.cache_redis import RedisCache
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log import Log

app = App(name="subject", help="What log and archive hold of one person.", result_action="return_value")


def erase(
    *,
    subject: Subject = None,
    tenant: Tenant = None,
    pseudonym: Pseudonym = None,
    request: str | None = None,
    reason: str = "",
    by: str | None = None,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative=())] = False,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[Path | None, Parameter(help="Write what was done and reached there as JSON.")] = None,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    schema_registry: Registry = None,
) -> int:
    """Erase a person: destroy their data keys, record it, purge caches, and say what their data reached.

    What was sealed for them opens nowhere from then on: tokens of their live traffic and their comments. There is no way
    back, so it shows what is known of them and asks. Repeated, it finishes what was left undone.

    Parameters
    ----------
    request
        Id of the request, for the record; by default a new one.
    reason
        A word for the record, which is kept for ever: nothing that names the person.
    by
        Who does it; by default the user of this machine.
    yes
        Do not ask: destroy first, and then look what was reached.
    dry_run
        Only show what is known of them.
    """
    stack = read_stack(dir)
    person = person_of(stack, subject, tenant, pseudonym)
    console = Console(stderr=True, highlight=False)
    keys = open_keys(stack)
    opened = open_history(
        "erase", dir=dir, bootstrap=bootstrap, prefix=prefix, schema_registry=schema_registry
    )
    with opened as past, closing(RedisCache(stack.redis_url)) as cached:
        state = keys.state(person)
        known = bool(state.live or state.destroyed)
        # Whoever does not ask destroys before anything else; where there is nothing to destroy, a look comes first.
        reach = None if yes and known and not dry_run else _traced(past.log, person, console)
        if reach is not None:
            _print(reach)
            if reach.nothing and not known:
                console.print(
                    f"nothing is known of {person}, nothing was done: are subject and tenant spelled as in their feedback?"
                )
                return 1
            if reach.generations > max(*state.live, *state.destroyed, 0, 0):
                raise ConfigError(_other_keys(reach))
            if dry_run:
                console.print(f"dry run: {len(state.live)} keys would be destroyed; nothing was done")
                return 0
            if not yes and not _confirmed(console, person):
                console.print("nothing was done")
                return 1
        asked = Request(person, request or _new_id(), reason, by or _user())
        done = erase_person(past.live, keys, cached, asked, SystemClock())
        if reach is None:
            reach = _traced(past.log, person, console)
            _print(reach)
    if json is not None:
        _write(json, _plain(done, reach))
    told = _told(console, done)
    if reach.generations > done.event.generations:
        raise ConfigError(_other_keys(reach))
    return told


@app.command
def export(
    *,
    out: Path,
    subject: Subject = None,
    tenant: Tenant = None,
    pseudonym: Pseudonym = None,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    schema_registry: Registry = None,
) -> int:
    """Write all that log and archive still hold of a person, in the clear, as one JSON file that only you may read.

    Their feedback with its comments, their live traffic with its tokens, the rewards of that, and the versions and fleets
    that it reached. What was erased says so. Exit code 1 where nothing is known of them.

    Parameters
    ----------
    out
        The file; it must not be there yet.
    """
    stack = read_stack(dir)
    person = person_of(stack, subject, tenant, pseudonym)
    console = Console(stderr=True, highlight=False)
    if out.exists():
        raise ConfigError(f"{out} is there already: name another file")
    with open_history(
        "subject-export", dir=dir, bootstrap=bootstrap, prefix=prefix, schema_registry=schema_registry
    ) as past:
        reach = _traced(past.log, person, console)
        found = list(export_person(past.log, reach, Looking(past.log, lambda: open_keys(stack)), _text))
    if reach.nothing:
        console.print(f"nothing is known of {person}: are subject and tenant spelled as in their feedback?")
        return 1
    events: dict[str, list[dict[str, Any]]] = {}
    for one in found:
        events.setdefault(one.topic, []).append(one.shown)
    exported_at = datetime.now(UTC).isoformat(timespec="seconds")
    _write(out, {"pseudonym": person, "exported_at": exported_at, "events": events, "reached": reach})
    gone = sum(one.erased for one in found)
    console.print(f"{len(found):,} events are in {out}" + (f"; {gone:,} of them are erased" if gone else ""))
    return 0


def _traced(log: Log, person: str, console: Console) -> Reach:
    columns = (TextColumn("reading the log"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        return trace(log, person, lambda done, of: bar.update(task, completed=done, total=of))


def _print(reach: Reach) -> None:
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    out.print(f"pseudonym {reach.subject}")
    table = Table(box=None, pad_edge=False)
    table.add_column("topic")
    table.add_column("events", justify="right")
    for topic, events in reach.topics.items():
        table.add_row(topic, f"{events:,}")
    if reach.topics:
        out.print(table)
    for one in reach.lineages:
        first = one.trained[0]
        out.print(
            f"model {one.model}, lineage {one.lineage}: trained on in version {ranges(one.trained)}; "
            f"carried by {ranges(one.carried)} of {one.newest}"
        )
        out.print(f"  to take it out of the weights as well: `rollwire weights revert --to {first - 1}`")
    for served in reach.served:
        out.print(f"served by {served.fleet}/{served.replica}: version {served.version}")
    if reach.topics and not reach.lineages:
        out.print("no version was trained on it")


def _told(console: Console, done: Done) -> int:
    event = done.event
    when = datetime.fromtimestamp(event.erased_us / 1e6, UTC).isoformat(timespec="seconds")
    keys = f"data keys 1 to {event.generations}" if event.generations > 1 else "1 data key"
    what = f"{keys} destroyed" if event.generations else "there was no data key"
    again = " before" if done.repeated else ""
    console.print(f"erased{again}: {what}; request {event.request_id} by {event.by}, {when}")
    if done.purged is None:
        console.print("the cache did not answer: run this again when Redis is up")
        return 1
    console.print(f"{done.purged:,} entries of the cache purged")
    return 0


def _other_keys(reach: Reach) -> str:
    return (
        f"the log holds what was sealed with data key {reach.generations} of {reach.subject}, and this key store never had "
        "it: is --dir the stack that it was written with?"
    )


def _confirmed(console: Console, person: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(f"nobody can be asked here: give --yes to erase {person}")
    console.print(f"erase {person} for good? [y/N] ", end="", markup=False)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _text(rollout: ProductionRollout, tokens: bytes) -> str | None:
    """A rollout's tokens as its environment reads them; None for an environment that is not known here."""
    try:
        environment = make_environment(rollout.environment)
    except ConfigError:
        return None
    return environment.decode(np.frombuffer(tokens, f"<{rollout.token_dtype}").astype(np.int64))


def _new_id() -> str:
    return new_group_id(SystemClock().now_us(), secrets.randbits(74))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # nobody by that number, as in a container
        return "unknown"


def _plain(done: Done, reach: Reach) -> dict[str, Any]:
    return {"erasure": done.event, "repeated": done.repeated, "purged": done.purged, "reached": reach}


def _write(path: Path, content: dict[str, Any]) -> None:
    """Readable by its owner alone, whole or not there."""
    data = msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"
    part = path.with_name(f".{path.name}.part")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    part.replace(path)
