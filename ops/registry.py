"""The schema registry of this process: set once when it starts, from the run's settings or the command line."""

from __future__ import annotations

from rollwire.schemas.codec import use_registry
from rollwire.streams.seams.registry_confluent import ConfluentRegistry


def set_registry(url: str | None, prefix: str) -> None:
    """Without a URL the process writes single-object encoding, which needs no registry.

    Raises `EnvironmentMissing` where a registry's client is not installed.
    """
    before = use_registry(None if url is None else ConfluentRegistry(url, prefix))
    if isinstance(before, ConfluentRegistry):
        before.close()
