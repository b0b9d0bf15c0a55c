"""The crowd of a run: where it goes, by the run's settings, and the API key it clicks with."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rollwire.ops.demo.feedback.people import Crowd, run_people
from rollwire.ops.role_run import Run
from rollwire.ops.settings import RunSettings
from rollwire.ops.stack import StackInfo
from rollwire.ops.stack.info import write_private
from rollwire.ops.stores import stack_store
from rollwire.producers.gateway.key_store import change_table, new_secret
from rollwire.producers.gateway.keys import NewKey, add_key, shown
from rollwire.schemas.errors import EnvironmentMissing
from rollwire.streams.seams.clock import SystemClock

KEY_FILE: Final = "people.key"


def make_key(folder: Path, settings: RunSettings, stack: StackInfo) -> None:
    """An API key for the crowd, once a run; its secret stands in the run's folder, readable by its owner only."""
    path = folder / KEY_FILE
    if path.exists():
        return
    key_id, secret = new_secret()
    new = NewKey(settings.serving.tenant, note=f"simulated people of {settings.prefix}")
    now_us = SystemClock().now_us()
    store = stack_store(stack, settings.bucket)
    change_table(
        store,
        settings.gateway.keys.folder,
        lambda table: add_key(table, key_id, secret, new, now_us),
        now_us,
    )
    write_private(path, shown(key_id, secret, publishable=False))


def run_crowd(run: Run) -> None:
    """Asks and clicks until `run.stop`. Raises `EnvironmentMissing` where the run has no key."""
    settings = run.settings
    try:
        key = (run.folder / KEY_FILE).read_text().strip()
    except FileNotFoundError:
        raise EnvironmentMissing(
            f"{run.folder / KEY_FILE} is missing: `rollwire demo --feedback` makes it"
        ) from None
    crowd = Crowd(
        serving=f"http://{settings.serving.host}:{settings.serving.port}",
        gateway=f"http://{settings.gateway.host}:{settings.gateway.port}",
        key=key,
        folder=run.folder,
        config=settings.people,
    )
    run_people(crowd, run.stop)
