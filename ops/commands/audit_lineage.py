"""`rollwire audit lineage`: where a version came from, and where an event or a person's data went."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from rollwire.consumers.audit.lineage import Answer
from rollwire.consumers.audit.lineage_trace import Progress as Told
from rollwire.consumers.audit.lineage_trace import Tracer
from rollwire.ops.auditing import JsonFile, auditing, conclude
from rollwire.ops.broker import DEFAULT_DIR, Bootstrap, Folder, Prefix, Registry
from rollwire.ops.history import open_history
from rollwire.ops.lineage_page import write_picture
from rollwire.ops.lineage_text import SHOWN, draw_answer
from rollwire.ops.person import Pseudonym, Subject, Tenant, person_of
from rollwire.ops.printing import bars, console, write_json
from rollwire.ops.stack import read_stack
from rollwire.schemas.errors import ConfigError


def lineage(
    *,
    version: Annotated[int | None, Parameter(help="What was this version made from?")] = None,
    rollout: Annotated[str | None, Parameter(help="What became of this rollout? Its id.")] = None,
    feedback: Annotated[
        str | None, Parameter(help="What became of this feedback? Its id, or <tenant>/<id>.")
    ] = None,
    subject: Subject = None,
    tenant: Tenant = None,
    pseudonym: Pseudonym = None,
    lineage: str | None = None,
    picture: Path | None = None,
    shown: int = SHOWN,
    json: JsonFile = None,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    schema_registry: Registry = None,
    bucket: str | None = None,
) -> int:
    """Explain a version, or follow a rollout, feedback or a person to the versions and fleets that it reached.

    Read from the log, the archive and the store alone. Exit code 1 where something is not known, missing, or does not fit
    together.

    Parameters
    ----------
    lineage
        The lineage that is meant, or the beginning of its id; by default the one that was started last.
    picture
        Draw it there as well: an .svg, or an .html that says more where the pointer is.
    shown
        Lines of each list that are printed.
    bucket
        Where the weights are; by default the run's.
    """
    with auditing():
        person = subject is not None or pseudonym is not None
        if sum((version is not None, rollout is not None, feedback is not None, person)) != 1:
            raise ConfigError(
                "ask one question: --version, --rollout, --feedback, or --subject with --tenant"
            )
        if picture is not None and picture.suffix not in (".svg", ".html"):
            raise ConfigError(f"--picture {picture}: name a file that ends in .svg or .html")
        whom = person_of(read_stack(dir), subject, tenant, pseudonym) if person else None
        with open_history(
            "audit-lineage",
            dir=dir,
            bootstrap=bootstrap,
            prefix=prefix,
            schema_registry=schema_registry,
            bucket=bucket,
        ) as past:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(),
            )
            with bars(*columns) as bar:
                tracer = Tracer(past.log, past.store, _told(bar))
                answer = _asked(tracer, version, rollout, feedback, whom, lineage)
        if json is not None:
            content = msgspec.to_builtins(answer.report) | {
                "answer": {
                    name: msgspec.to_builtins(getattr(answer, name))
                    for name in answer.__struct_fields__
                    if name != "report"
                }
            }
            write_json(json, content)
        if picture is not None:
            write_picture(answer, picture)
        if answer.versions or answer.groups:
            console().print(draw_answer(answer, max(1, shown)))
        return conclude(answer.report)


def _asked(
    tracer: Tracer,
    version: int | None,
    rollout: str | None,
    feedback: str | None,
    person: str | None,
    lineage: str | None,
) -> Answer:
    if version is not None:
        return tracer.version(version, lineage)
    if rollout is not None:
        return tracer.rollout(rollout, lineage)
    if feedback is not None:
        return tracer.feedback(feedback, lineage)
    return tracer.person(person or "", lineage)


def _told(bar: Progress) -> Told:
    task = bar.add_task("", total=None)

    def told(what: str, done: int, of: int) -> None:
        bar.update(task, description=what, completed=done, total=of or None)

    return told
