"""Draws for tasks: the same with every version of every library, since held-out tasks must stay what they were."""

from __future__ import annotations

import hashlib
from typing import Final

HELD_OUT_ONE_IN: Final = 10


def pick(purpose: str, seed: int, counter: int, choices: int) -> int:
    """A draw from 0..choices-1: draw number `counter` of a purpose and a seed."""
    digest = hashlib.blake2b(f"{purpose}:{seed}:{counter}".encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little") % choices


def is_held_out(task_id: str) -> bool:
    """Whether a task belongs to evaluation alone, by its id (hex digits): one split for every environment."""
    return int(task_id, 16) % HELD_OUT_ONE_IN == 0
