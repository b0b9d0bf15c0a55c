"""`rollwire attribute`: a worker that joins feedback to live answers and gives each its reward."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from rollwire.ops.broker import DEFAULT_DIR, Bootstrap, Folder, Prefix, Registry, broker


def attribute(
    *,
    rules: Path | None = None,
    model: str = "policy",
    host: str = "127.0.0.1",
    port: int = 0,
    clock_skew_s: float = 2.0,
    replication: int = 1,
    bootstrap: Bootstrap = None,
    prefix: Prefix = None,
    schema_registry: Registry = None,
    dir: Folder = DEFAULT_DIR,
) -> None:
    """Fold feedback into one reward for each live answer, when its window closes, until told to stop.

    Several workers share the partitions out. Live counts are served at /counts, coverage by outcome class at /coverage.
    SIGTERM ends it within 10 s; after a kill it goes on where it was, and changes no reward.

    Parameters
    ----------
    rules
        TOML file of signals, windows and weights. It goes into the log, and holds for answers opened 15 s later; without one
        the newest rules in the log hold on, and the built-in ones where there are none.
    model
        Name of the model that the rules are of.
    host
        Address that the tables are served on.
    port
        0: a free one, named in the log.
    clock_skew_s
        Seconds that the broker's clock may be behind this one: windows of idle topics close so much later.
    replication
        Replication factor of the worker's own topic: 3 on a cluster that matters.
    """
    from rollwire.ops.config_errors import config_error
    from rollwire.streams.attribution.config import AttributionConfig
    from rollwire.streams.attribution.worker import run_attribution

    at = broker(dir, bootstrap, prefix, schema_registry)
    values = {
        "bootstrap": at.bootstrap,
        "prefix": at.prefix,
        "model": model,
        "rules": rules,
        "web_host": host,
        "web_port": port,
        "clock_skew_s": clock_skew_s,
        "replication": replication,
    }
    try:
        config = AttributionConfig.model_validate(values)
    except ValidationError as error:
        raise config_error(error, AttributionConfig, where="attribute") from None
    run_attribution(config)
