"""Which process is hit how and when: in turn, evenly over the run, the order drawn from a seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

How = Literal["kill -9", "SIGTERM", "SIGSTOP"]
HOWS: Final[tuple[How, ...]] = ("kill -9", "SIGTERM", "SIGSTOP")
BROKER: Final = "broker"
_FIRST, _LAST = 0.03, 0.92  # shares of the run: the first fault finds work under way, the last one too


class Fault(NamedTuple):
    number: int  # 1, 2, 3, ...
    at: float  # share of the run, 0 to 1
    whom: str
    how: How


def plan_faults(whom: Sequence[str], faults: int, seed: int) -> tuple[Fault, ...]:
    """`faults` faults: everyone is hit once before anyone is hit again, and in another way each time.

    After 3 * len(whom) faults everyone was hit in every way. Nobody is hit twice in a row.
    """
    draw = random.Random(seed)
    first = {name: draw.randrange(len(HOWS)) for name in whom}
    planned: list[Fault] = []
    while len(planned) < faults:
        turn = list(whom)
        draw.shuffle(turn)
        if len(turn) > 1 and planned and turn[0] == planned[-1].whom:
            turn.append(turn.pop(0))
        for name in turn[: faults - len(planned)]:
            number = len(planned)
            how = HOWS[(first[name] + number // len(whom)) % len(HOWS)]
            planned.append(Fault(number + 1, _share(number, faults), name, how))
    return tuple(planned)


def _share(number: int, faults: int) -> float:
    return _FIRST + (_LAST - _FIRST) * number / max(1, faults - 1)
