"""The gateway's counters, read while it works: law 7's five numbers, and whether they add up at every moment."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, NamedTuple, Self

from rollwire.schemas.errors import LogError

_LINE: Final = re.compile(
    r"^rollwire_events_(received_total|accepted_total|refused_total|shed_total|pending)\{?[^}\s]*\}? (\S+)$",
    re.MULTILINE,
)


class Counters(NamedTuple):
    received: int
    accepted: int
    refused: int
    shed: int
    pending: int

    @property
    def gap(self) -> int:
        """0 is the only good value."""
        return self.received - self.accepted - self.refused - self.shed - self.pending


def parse_counters(exposition: str) -> Counters:
    """Out of `/metrics`, summed over labels. Raises `LogError` where one that must be there is not."""
    sums = dict.fromkeys(("received_total", "accepted_total", "refused_total", "shed_total", "pending"), 0.0)
    found = set[str]()
    for name, value in _LINE.findall(exposition):
        sums[name] += float(value)
        found.add(name)
    if missing := {"received_total", "accepted_total", "pending"} - found:
        raise LogError(f"/metrics says nothing of {sorted(missing)}")
    return Counters(*(round(value) for value in sums.values()))


class Watch:
    """Asks again and again while the block runs. `gaps`: every moment at which the numbers did not add up."""

    def __init__(self, ask: Callable[[], str], every_s: float = 0.5) -> None:
        self._ask = ask
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="counters", daemon=True)
        self.seen = 0
        self.gaps: list[Counters] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                counters = parse_counters(self._ask())
            except OSError:  # killed, or being started again
                continue
            self.seen += 1
            if counters.gap:
                self.gaps.append(counters)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
