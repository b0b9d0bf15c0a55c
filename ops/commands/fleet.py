"""`rollwire fleet follow | status | pin | promote | gate`: who serves which version."""

from __future__ import annotations

import getpass
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter, validators
from rich.console import Console
from rich.table import Table

from rollwire.consumers.weights.follow import NO_VERSION, Follow, FollowConfig, own_channel, promotion
from rollwire.consumers.weights.follower import Follower
from rollwire.consumers.weights.slices import choose_slices, parse_slices, share_of
from rollwire.consumers.weights.targets.vllm import Kv
from rollwire.ops.broker import DEFAULT_DIR, Bootstrap, Broker, Folder, Prefix, Registry, broker
from rollwire.ops.commands.fleet_gate import gate
from rollwire.ops.fleet_table import Row, fold
from rollwire.ops.fleet_targets import TargetName, TargetOptions, command_probe, open_target
from rollwire.ops.printing import console, write_json
from rollwire.ops.stopping import stop_on_signals
from rollwire.ops.stores import bucket_store
from rollwire.schemas.errors import ConfigError, WeightError
from rollwire.schemas.records import Event, WeightVersion
from rollwire.streams.emit import outgoing, take
from rollwire.streams.seams.clock import SystemClock
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.scan import scan

app = App(name="fleet", help="Keep a replica at a version; say which one; show who serves what.")
app.command(gate)

Version = Annotated[int | None, Parameter(validator=validators.Number(gte=0))]
Fleet = Annotated[str, Parameter(help="Name of the fleet.")]
Lineage = Annotated[str | None, Parameter(help="Training run; by default the one started last.")]


@app.command
def follow(
    *,
    target: TargetName = "folder",
    folder: Path | None = None,
    extra: Path | None = None,
    url: str | None = None,
    kv: Kv = "keep",
    fingerprint: Annotated[bool, Parameter(negative=())] = False,
    channel: str | None = None,
    version: Version = None,
    slice: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    probe: str | None = None,
    probe_s: Annotated[float, Parameter(validator=validators.Number(gt=0))] = 60.0,
    until: Version = None,
    until_s: Annotated[float, Parameter(validator=validators.Number(gt=0))] = 600.0,
    fleet: Fleet = "fleet",
    replica: str | None = None,
    model: str | None = None,
    lineage: Lineage = None,
    store_probe: bool = True,
    bucket: str | None = None,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    schema_registry: Registry = None,
) -> int:
    """Keep what serves at a version, until SIGTERM: fetched and verified while it serves, swapped, probed, undone if wrong.

    Without --channel or --version it is the newest version. `rollwire fleet pin` comes before either, while this runs.

    Parameters
    ----------
    target
        folder: safetensors under FOLDER/current, a link that always leads to one whole version. vllm, sglang: an engine at
        --url that is told to load that folder. numpy: memory of this process, to try a bucket and a broker.
    folder
        Where the weights are written; the engine must see it under the same name.
    extra
        Folder whose files (config.json, tokenizer, ...) are put beside each version's weights.
    url
        Address of the engine; $ROLLWIRE_ENGINE_KEY is its API key, if it has one.
    kv
        What becomes of the engine's running requests at a swap: keep goes on with their cache, recompute reads them anew.
    fingerprint
        Hash the engine's weights after each load, within the pause: it must not only say that it loaded them.
    channel
        Serve what this channel was promoted to last.
    version
        Serve this version, and no other.
    slice
        Part of the tensors to hold, as pattern=rank/ranks over dimension 0; numpy only. Repeatable, the first that fits counts.
    probe
        A program with its arguments, run after each swap without a shell, with ROLLWIRE_VERSION and ROLLWIRE_FOLDER; another
        exit code than 0 undoes the swap.
    probe_s
        Seconds that it may take.
    until
        End with exit code 0 once this version is served, and with 1 where it is not in time.
    until_s
        Seconds for --until.
    replica
        Name of this replica; by default the host's. No two that run have the same one.
    model
        Name of the model; by default any.
    store_probe
        Prove at the start that the store honours conditions; off where the key may only read.
    bucket
        Bucket of the fleet's region; by default the stack's.
    """
    spec = parse_slices(slice)
    if spec and target != "numpy":
        raise ConfigError(f"--slice goes with --target numpy: {target} holds whole tensors")
    config = _follow_config(channel, version)
    check = None if probe is None else command_probe(probe, folder, probe_s)
    at = broker(dir, bootstrap, prefix, schema_registry)
    store = bucket_store(dir, bucket)
    if store_probe:
        store.probe()
    stop = threading.Event()
    stop_on_signals(stop)
    serves = open_target(TargetOptions(target, folder, extra, url, kv, fingerprint))
    with at.log("fleet") as log, closing(serves):
        follower = Follower(
            log,
            store,
            serves,
            fleet=fleet,
            replica=replica or socket.gethostname(),
            lineage=lineage,
            model=model,
            follow=config,
            probe=check,
            choose=choose_slices(spec) if spec else None,
            share=share_of(spec),
        )
        with closing(follower):
            return _watch(follower, stop, until, until_s)


@app.command
def status(
    *,
    json: Annotated[Path | None, Parameter(help="Write the rows there as JSON.")] = None,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    schema_registry: Registry = None,
) -> None:
    """Show every replica: what it serves and wants, how far behind it is, its last swap, and why it refused one."""
    with broker(dir, bootstrap, prefix, schema_registry).log("fleet") as log:
        table = fold(_events(log, "weight-versions", "fleet-status"))
    rows = table.rows(SystemClock().now_us())
    write_json(json, [row._asdict() for row in rows])
    console().print(draw(rows) if rows else "no replica has reported yet")


@app.command
def pin(
    replica: str,
    version: Version = None,
    /,
    *,
    release: Annotated[bool, Parameter(negative=())] = False,
    fleet: Fleet = "fleet",
    reason: str = "",
    by: str | None = None,
    lineage: Lineage = None,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    schema_registry: Registry = None,
) -> None:
    """Pin one replica to a version, forwards or back, or release it. A replica that runs obeys at once, one that starts too.

    It is a promotion onto the replica's own channel, FLEET/REPLICA, and comes before whatever the replica follows.

    Parameters
    ----------
    release
        Follow again what the replica was started to follow.
    reason
        Why, for whoever reads the log.
    by
        Who says so; by default the user's name.
    """
    if (version is None) != release:
        raise ConfigError("say either a version or --release")
    at = broker(dir, bootstrap, prefix, schema_registry)
    wanted = NO_VERSION if version is None else version
    _promote(at, own_channel(fleet, replica), wanted, lineage=lineage, by=by, reason=reason)


@app.command
def promote(
    *,
    channel: str,
    version: Annotated[int, Parameter(validator=validators.Number(gte=0))],
    reason: str = "",
    by: str | None = None,
    lineage: Lineage = None,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    schema_registry: Registry = None,
) -> None:
    """Promote a version onto a channel: its followers serve it from now on, whether it is newer or older. The last word counts.

    Parameters
    ----------
    channel
        Name of the channel, without a slash: FLEET/REPLICA is a replica's own, see `rollwire fleet pin`.
    reason
        Why, for whoever reads the log.
    by
        Who says so; by default the user's name.
    """
    if "/" in channel:
        raise ConfigError(
            f"channel {channel!r}: with a slash it is a replica's own; use `rollwire fleet pin`"
        )
    at = broker(dir, bootstrap, prefix, schema_registry)
    _promote(at, channel, version, lineage=lineage, by=by, reason=reason)


def draw(rows: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    words = ("replica", "target", "state", "channel", "refused because")
    for column in (
        "replica", "target", "state", "served", "wanted", "lag", "pause ms", "stage ms", "fetched", "channel", "age",
        "refused because",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column in words else "right")
    for row in rows:
        table.add_row(
            f"{row.fleet}/{row.replica}",
            row.target,
            row.state,
            _number(row.served),
            _number(row.wanted),
            "" if row.lag is None else str(row.lag),
            f"{row.pause_ms:.1f}",
            f"{row.stage_ms:.0f}",
            f"{row.fetched_bytes:,}",
            row.channel,
            f"{row.age_s:,.0f} s",
            row.reason,
        )
    return table


def _number(version: int) -> str:
    return "" if version == NO_VERSION else str(version)


def _follow_config(channel: str | None, version: int | None) -> FollowConfig:
    if channel is not None and version is not None:
        raise ConfigError("--channel and --version contradict each other")
    if channel is not None:
        return FollowConfig(mode="channel", channel=channel)
    return FollowConfig() if version is None else FollowConfig(mode="pinned", version=version)


def _watch(follower: Follower, stop: threading.Event, until: int | None, until_s: float) -> int:
    out = Console(highlight=False)
    said: WeightVersion | None = None
    deadline = time.monotonic() + until_s
    while not stop.wait(0.1):
        served = follower.served
        if served is not None and served != said:
            line = f"serves version {served.version} of {served.lineage}, digest {served.state_digest}"
            out.print(line, soft_wrap=True)
            said = served
        if until is not None and served is not None and served.version == until:
            return 0
        if until is not None and time.monotonic() > deadline:
            what = (
                "nothing is served" if served is None else f"version {served.version} is what it follows to"
            )
            raise WeightError(
                f"version {until} was not served within {until_s:g} s: {follower.problem or what}"
            )
    return 0 if until is None else 1


def _promote(
    at: Broker, channel: str, version: int, *, lineage: str | None, by: str | None, reason: str
) -> None:
    with at.log("fleet") as log:
        known = Follow(FollowConfig(), own="", lineage=lineage)
        for one in _events(log, "weight-versions"):
            known.add(one)
        newest = known.wanted().event
        event = newest if version == NO_VERSION else known.event(known.lineage or "", version)
        if newest is None:
            raise WeightError(
                f"no version is published{f' of lineage {lineage}' if lineage else ' under this prefix'}"
            )
        if event is None:
            raise WeightError(
                f"version {version} is not published in lineage {known.lineage}: 0 to {newest.version} are known"
            )
        now = SystemClock().now_us()
        promoted = promotion(
            version,
            channel,
            model=event.model,
            lineage=event.lineage,
            by=by or getpass.getuser(),
            at_us=now,
            reason=reason,
        )
        with closing(log.writer()) as writer:
            writer.write([outgoing(promoted, source="rollwire/fleet", time_us=now)])
    word = "is released" if version == NO_VERSION else f"is at version {version} of {event.lineage}"
    Console(highlight=False).print(f"channel {channel} {word}")


def _events(log: Log, *topics: str) -> Iterator[Event]:
    """What was refused once is in dead-letters, and no matter of ours."""
    for record in scan(log, topics):
        taken = take(record).event
        if isinstance(taken, Event):
            yield taken
