"""Which versions the monitor runs on: refused at the start, by name, where they are others (C55).

Faust reaches into aiokafka and mode, so another minor version of those may start, read, and stop reading later.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Final

from rollwire.schemas.errors import EnvironmentMissing

Version = tuple[int, ...]

SUPPORTED: Final[Mapping[str, tuple[Version, Version]]] = {
    "Python": ((3, 11), (3, 14)),
    "faust-streaming": ((0, 15, 3), (0, 16)),
    "aiokafka": ((0, 12), (0, 15)),
    "mode-streaming": ((0, 4), (0, 8)),
}
"""What is supported: from a version on, and below another one."""


def installed() -> dict[str, str]:
    """The versions in this environment; a package that is not there is absent."""
    found = {"Python": ".".join(map(str, sys.version_info[:3]))}
    for name in SUPPORTED:
        if name != "Python":
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
    return found


def check_versions(found: Mapping[str, str], what: str = "the monitor") -> None:
    """Raises `EnvironmentMissing` that names every version which is not supported, and those that are."""
    wrong = [
        f"{name} {found.get(name, 'is not there')} (supported: {_text(low)} to below {_text(high)})"
        for name, (low, high) in SUPPORTED.items()
        if not low <= _parsed(found.get(name, "")) < high
    ]
    if wrong:
        raise EnvironmentMissing(
            f"{what} does not run on {', '.join(wrong)}; the other roles do: install supported versions for it"
        )


def _parsed(version: str) -> Version:
    """The leading numbers: `0.15.3.post1` is (0, 15, 3); nothing is below everything."""
    leading = re.match(r"\d*(?:\.\d+)*", version)
    return tuple(int(part) for part in leading[0].split(".") if part) if leading is not None else ()


def _text(version: Version) -> str:
    return ".".join(map(str, version))
