"""Whether feedback's window fits into what waits for its rewards: settings and a rules file that are each right, and not together."""

from __future__ import annotations

from rollwire.ops.settings import RunSettings
from rollwire.schemas.errors import ConfigError
from rollwire.schemas.rules import Rules


def check_windows(rules: Rules, settings: RunSettings) -> None:
    """Raises `ConfigError` where every reward by these rules would come too late to be trained on: a window ends, and its
    reward is given, `window_s` after its answer's group was opened at the earliest."""
    waits = {"production.group_deadline_s": settings.production.group_deadline_s}
    if settings.live:
        waits["pack.cohort.max_age_s"] = settings.pack.cohort.max_age_s
    for name, seconds in waits.items():
        if rules.window_s >= seconds:
            raise ConfigError(
                f"the rules {rules.name!r} give rewards {rules.window_s:g} s after an answer (window_s), but {name} is {seconds:g}: "
                f"all of them would come too late; raise {name}, or lower window_s"
            )
