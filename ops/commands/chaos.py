"""`rollwire chaos ...`: processes and the broker are killed and paused under a known load, and nothing may be lost or doubled."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

Json = Annotated[Path | None, Parameter(name="--json", help="Write the figures there, in the common form.")]

app = App(
    name="chaos",
    help="Kill and pause processes and the broker under a known load; count what is lost or doubled.",
)
