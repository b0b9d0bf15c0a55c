"""A fault of our own, as a log may hold it: its kind and where it came from, never what was worked on.

A traceback's message may quote a value, and some formatters print all variables on the way: a person's words among them.
"""

from __future__ import annotations

import traceback
from pathlib import PurePath
from typing import Final

_SHOWN: Final = 8  # innermost frames


def fault_of(error: BaseException) -> dict[str, str]:
    """`error`: the class; `at`: file, line and function of each frame, innermost last."""
    frames = traceback.extract_tb(error.__traceback__)[-_SHOWN:]
    at = " > ".join(f"{PurePath(f.filename).name}:{f.lineno} {f.name}" for f in frames)
    return {"error": type(error).__name__, "at": at}
