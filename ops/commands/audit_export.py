"""`rollwire audit export`: the history of a run as Parquet files, for whoever asks in SQL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

from cyclopts import Parameter
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from rollwire.ops.auditing import JsonFile, auditing, conclude
from rollwire.ops.broker import DEFAULT_DIR, Bootstrap, Folder, Prefix, Registry
from rollwire.ops.commands.weights_access import Bucket
from rollwire.ops.history import open_history
from rollwire.ops.lake.places import LivePast, cores, lake_at
from rollwire.ops.moments import moment_of
from rollwire.ops.printing import bars
from rollwire.schemas.catalogue import TOPICS, topic_named
from rollwire.schemas.errors import EnvironmentMissing
from rollwire.streams.findings import Report

_Progress = tuple[Callable[[str, int], None], Callable[[int], None]]


def export(
    *,
    to: str,
    topic: tuple[str, ...] = (),
    since: Annotated[str | None, Parameter(name=("--from", "--since"))] = None,
    until: Annotated[str | None, Parameter(name="--until")] = None,
    check: Annotated[bool, Parameter(negative="")] = False,
    processes: int | None = None,
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
    processes
        That share the work, where there is much of it. By default one for each core that this one may use, at most four.
    """
    with auditing():
        topics = [topic_named(one).name for one in topic] or list(TOPICS)
        since_ms, until_ms = _ms(since, "--from"), _ms(until, "--until")
        try:
            from rollwire.consumers.audit import lake_check, lake_export, lake_share
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
                    share=lake_share.Share(
                        processes if processes is not None else cores(),
                        LivePast(to, dir, bootstrap, prefix, schema_registry, bucket),
                    ),
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


def _ms(text: str | None, option: str) -> int | None:
    return None if text is None else round(moment_of(text, option).timestamp() * 1_000)


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
