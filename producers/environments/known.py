"""The environments by name, and what the commands ask of one beyond the seam."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from rollwire.producers.environments.calculator import Calculator
from rollwire.producers.environments.countdown import Countdown
from rollwire.producers.environments.demonstrations import Demonstrations
from rollwire.schemas.errors import ConfigError
from rollwire.streams.seams.environment import Environment, Task


class LearnableEnvironment(Environment, Protocol):
    """One that a run can begin from nothing on: with demonstrations for its warm start and held-out tasks."""

    def encode(self, text: str) -> NDArray[np.int64]:
        """Ids of a text, as `decode` gives it back. Raises `ConfigError` for what is not in the vocabulary."""
        ...

    def demonstrations(self, n: int, seed: int) -> Demonstrations:
        """`n` of training tasks."""
        ...

    def held_out_draws(self, n: int, seed: int) -> list[Task]:
        """As they are drawn: frequent problems repeat."""
        ...

    def distinct_held_out(self, n: int, seed: int) -> list[Task]:
        """All different, equally likely."""
        ...

    def problems(self, *, held_out: bool) -> frozenset[str]:
        """Ids of all problems of one side."""
        ...


ENVIRONMENTS: Final[Mapping[str, Callable[[], LearnableEnvironment]]] = {
    "countdown": Countdown,
    "calculator": Calculator,
}


def make_environment(name: str) -> LearnableEnvironment:
    """Raises `ConfigError` for a name that is not known."""
    make = ENVIRONMENTS.get(name)
    if make is None:
        raise ConfigError(f"there is no environment {name!r}; there are: {', '.join(ENVIRONMENTS)}")
    return make()
