"""`rollwire weights revert`: a new version with the weights of an older one, and the trainer restored to it."""

from __future__ import annotations

import getpass

from rollwire.consumers.weights.revert import RevertRun
from rollwire.consumers.weights.revert import revert as make_revert
from rollwire.ops.broker import DEFAULT_DIR, Bootstrap, Folder, Prefix, Registry, broker
from rollwire.ops.commands.weights_access import Bucket, Lineage, chosen, of_lineage
from rollwire.ops.printing import console
from rollwire.ops.stores import bucket_store


def revert(
    *,
    to: int,
    why: str = "",
    by: str | None = None,
    lineage: Lineage = None,
    bucket: Bucket = None,
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
    with at.log("revert") as log:
        newest = chosen(of_lineage(log, lineage)[0], None)
        made = make_revert(
            RevertRun(
                log,
                bucket_store(dir, bucket),
                at.prefix,
                newest.model,
                newest.lineage,
                to,
                by or _user(),
                why,
            )
        )
    way = "whole" if made.base_version is None else f"as a delta on version {made.base_version}"
    console().print(
        f"version {made.version} has the weights of version {to}: published {way}, {made.stored_bytes:,} bytes\n"
        f"lineage {made.lineage}, digest {made.state_digest}"
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # nobody by that number, as in a container
        return "unknown"
