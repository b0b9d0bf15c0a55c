"""`rollwire serve-at`: a replica pinned to the past."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rollwire.ops.broker import DEFAULT_DIR, Bootstrap, Folder, Prefix, Registry
from rollwire.ops.commands.weights_access import Bucket, Lineage
from rollwire.ops.stack.ports import HOST
from rollwire.ops.stub_engine.config import Kind


def serve_at(
    *,
    version: Annotated[int, Parameter(name="--version")],
    lineage: Lineage = None,
    port: int = 8000,
    host: str = HOST,
    kind: Kind = "vllm",
    replica: str | None = None,
    quiet: Annotated[bool, Parameter(negative=())] = False,
    max_running: int = 64,
    bucket: Bucket = None,
    dir: Folder = DEFAULT_DIR,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    schema_registry: Registry = None,
) -> None:
    """Answer an inference engine's HTTP calls with an old version's weights until told to stop.

    The version is rebuilt from snapshots and deltas, log and archive alone, and verified; the built-in engine samples with
    it where torch is installed. Its calls are those of `rollwire stub-engine`; one that would load other weights is refused.
    `$ROLLWIRE_ENGINE_KEY` is the API key that it wants. The replica reports to fleet-status, in the fleet `serve-at`.

    Parameters
    ----------
    version
        What is served; answers carry it as their weight version.
    port
        0: a free one, named on standard output.
    kind
        Whose calls: vLLM's or SGLang's.
    replica
        Its name in fleet-status; by default `at-<version>`.
    quiet
        Leave no trace: report nothing to fleet-status.
    max_running
        Requests decoded at once.
    """
    from rollwire.consumers.audit.rebuild_past import read_past
    from rollwire.ops.history import open_history
    from rollwire.ops.http_server import run_server
    from rollwire.ops.past_replica import config_of, past_version, pinned, reporting, write_folder
    from rollwire.ops.stub_engine.serve import stub_app
    from rollwire.schemas.errors import WeightError

    with ExitStack() as opened:
        history = opened.enter_context(
            open_history(
                "serve-at",
                dir=dir,
                bootstrap=bootstrap,
                prefix=prefix,
                schema_registry=schema_registry,
                bucket=bucket,
            )
        )
        past = read_past(history.log, lineage).past
        if past is None:
            raise WeightError(f"no version is published{f' of lineage {lineage}' if lineage else ''}")
        found = past_version(history.store, past, version)
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="rollwire-at-")))
        write_folder(folder, history.store, past, found)
        config = config_of(
            folder,
            found,
            kind,
            max_running=max_running,
            api_key=os.environ.get("ROLLWIRE_ENGINE_KEY") or None,
        )
        core = opened.enter_context(pinned(config, found))
        serving = None
        if not quiet:
            name = replica or f"at-{version}"
            serving = opened.enter_context(reporting(history.live, found.event, replica=name))

        def ready(url: str) -> None:
            said = (
                f"version {version} ({found.event.state_digest[:16]}) of {past.lineage} at {url}, as {kind}"
            )
            print(said, file=sys.stdout, flush=True)
            if serving is not None:
                serving()

        run_server(stub_app(core), host, port, ready=ready)
