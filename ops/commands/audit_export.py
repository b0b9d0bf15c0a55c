"""`rollwire audit export`: the history of a run as Parquet files, for whoever asks in SQL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from rollwire.ops.auditing import JsonFile, auditing, conclude
from rollwire.ops.broker import DEFAULT_DIR, Bootstrap, Folder, Prefix, Registry
from rollwire.ops.commands.weights_access import Bucket
from rollwire.ops.history import open_history
from rollwire.ops.printing import bars
from rollwire.ops.stores import bucket_store
from rollwire.schemas.catalogue import TOPICS, topic_named
from rollwire.schemas.errors import ConfigError, EnvironmentMissing
from rollwire.streams.findings import Report
from rollwire.streams.seams.store import ObjectStore
from rollwire.streams.seams.store_folder import FolderStore

_S3: Final = "s3://"
_Progress = tuple[Callable[[str, int], None], Callable[[int], None]]


def export(
    *,
    to: str,
    topic: tuple[str, ...] = (),
    since: Annotated[str | None, Parameter(name=("--from", "--since"))] = None,
    until: Annotated[str | None, Parameter(name="--until")] = None,
    check: Annotated[bool, Parameter(negative="")] = False,
    json: JsonFile = None,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    bucket: Bucket = None,
    schema_registry: Registry = None,
) -> int:
    """Write every topic as Parquet: topic=<t>/hour=<UTC hour>/..., one row an event, from archive and log.

    Each record stands in the lake once. An export that was killed goes on when it is run again; one that ended adds what came
    since. A record that cannot be decoded is a finding, and its place stands under _undecoded/. What is encrypted stays so.

    Parameters
    ----------
    to
        A folder, or s3://bucket/prefix in the store of the stack.
    topic
        These topics only; all others can follow later.
    since
        Records of this broker's time and later, as in 2026-11-30T06; a time without a zone is UTC.
    until
        Records before this time. A lake has one range of times for good.
    check
        Write nothing: hold the lake against the history, every row of it.
    """
    with auditing():
        topics = [topic_named(one).name for one in topic] or list(TOPICS)
        since_ms, until_ms = _ms(since, "--from"), _ms(until, "--until")
        try:
            from rollwire.consumers.audit import lake_check, lake_export
        except ModuleNotFoundError as error:
            raise EnvironmentMissing(
                f"{error.name} is not installed; install the extra: pip install 'rollwire[lake]'"
            ) from error
        with (
            open_history(
                "audit-export",
                dir=dir,
                bootstrap=bootstrap,
                prefix=prefix,
                schema_registry=schema_registry,
                bucket=bucket,
            ) as past,
            _bar("checking" if check else "exporting") as (told, sized),
        ):
            past.demand_run()
            store, root = lake_at(to, dir)
            if check:
                report = lake_check.check(past.log, store, name=past.name, root=root, told=told)
            else:
                made = lake_export.export(
                    past.log,
                    store,
                    name=past.name,
                    topics=topics,
                    from_ms=since_ms,
                    to_ms=until_ms,
                    root=root,
                    told=told,
                    sized=sized,
                )
                report = Report(
                    command="audit export",
                    findings=made.findings,
                    checked={
                        "rows": made.rows,
                        "stretches": made.stretches,
                        "files": made.files,
                        "bytes": made.nbytes,
                    },
                    notes=() if made.rows else ("the lake has everything up to here",),
                )
        return conclude(report, json)


def lake_at(to: str, dir: Path) -> tuple[ObjectStore, str]:
    """The store of a lake, and what stands before its keys. Raises `ConfigError`, `StackError`."""
    if not to.startswith(_S3):
        folder = FolderStore(Path(to))
        folder.ensure_bucket()
        return folder, ""
    bucket, _, before = to.removeprefix(_S3).partition("/")
    if not bucket:
        raise ConfigError(f"--to {to}: say s3://bucket/prefix")
    before = before.strip("/")
    if not before:
        raise ConfigError(
            f"--to {to}: say a prefix too, as in s3://{bucket}/lake: a bucket may hold other things"
        )
    store = bucket_store(dir, bucket)
    store.ensure_bucket()
    return store, before + "/"


def _ms(text: str | None, option: str) -> int | None:
    if text is None:
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: say a time as in 2026-11-30T06 ({error})") from error
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    return round(time.timestamp() * 1_000)


@contextmanager
def _bar(what: str) -> Iterator[_Progress]:
    """A bar of records, on a terminal. Control records have offsets too, so it may end early."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with bars(*columns) as shown:
        line = shown.add_task(what, total=None)
        totals = [0]

        def sized(offsets: int) -> None:
            totals[0] += offsets
            shown.update(line, total=totals[0])

        yield (lambda topic, more: shown.update(line, advance=more, description=f"{what} {topic}")), sized
