"""`rollwire weights revert`: a new version with the weights of an older one, and the trainer restored to it."""

from __future__ import annotations

import getpass
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from rollwire.consumers.weights.revert import RevertRun
from rollwire.consumers.weights.revert import revert as make_revert
from rollwire.consumers.weights.versions import Versions
from rollwire.ops.broker import DEFAULT_DIR, Bootstrap, Folder, Prefix, Registry, broker
from rollwire.ops.stack import read_stack
from rollwire.schemas.errors import Refused, WeightError
from rollwire.schemas.records import WeightVersion
from rollwire.streams.emit import decode_record
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.log_kafka import KafkaLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store_s3 import S3Store


def revert(
    *,
    to: int,
    why: str = "",
    by: str | None = None,
    lineage: Annotated[str | None, Parameter(help="Training run; by default the one started last.")] = None,
    bucket: Annotated[
        str | None, Parameter(help="Bucket in the local stack's store; by default its own.")
    ] = None,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    schema_registry: Registry = None,
) -> None:
    """Go back to an older version: publish its weights as a new, higher one and restore the trainer to it.

    A trainer that runs is fenced: it ends, and its next start goes on from the new version. Fleets follow to the new
    version. Rollouts of the versions that were given up are refused as `lineage_abandoned`.

    Parameters
    ----------
    to
        The version to go back to.
    why
        The reason, for the notice and the step.
    by
        Who does it; by default the user of this machine.
    """
    at = broker(dir, bootstrap, prefix, schema_registry)
    stack = read_stack(dir)
    log = KafkaLog(at.bootstrap, at.prefix, client_id="rollwire-revert")
    try:
        newest = _newest(log, lineage)
        made = make_revert(
            RevertRun(
                log,
                S3Store(
                    stack.s3_endpoint,
                    bucket or stack.bucket,
                    stack.access_key,
                    stack.secret_key,
                    stack.region,
                ),
                at.prefix,
                newest.model,
                newest.lineage,
                to,
                by or _user(),
                why,
            )
        )
    finally:
        log.close()
    Console(highlight=False).print(
        f"version {made.version} has the weights of version {to}: {made.stored_bytes:,} bytes lead there from version "
        f"{newest.version}\nlineage {made.lineage}, digest {made.state_digest}"
    )


def _newest(log: Log, lineage: str | None) -> WeightVersion:
    """Raises `WeightError` where there is none."""
    versions = Versions(lineage)
    for record in scan(log, ["weight-versions"]):
        try:
            event = decode_record(record)
        except Refused:
            continue  # it is no version; a hole is told when the history is read
        if isinstance(event, WeightVersion):
            versions.add(event)
    if versions.newest is None:
        raise WeightError(f"there is no version{f' of lineage {lineage}' if lineage else ''} yet")
    return versions.newest


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # nobody by that number, as in a container
        return "unknown"
