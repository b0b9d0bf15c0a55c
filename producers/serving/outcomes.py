"""Outcome classes of the environments' answers: what coverage of live traffic is counted by."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollwire.producers.environments.arithmetic import evaluate
from rollwire.producers.serving.answer import Classify, Texts, by_finish


def of_expressions(texts: Texts, end_id: int) -> Classify:
    """Answers that should be an arithmetic expression: "answered" where they are one, else "unreadable", "cut_off", ..."""

    def classify(sampled_ids: NDArray[np.int64], finish_reason: str) -> str:
        outcome = by_finish(sampled_ids, finish_reason)
        if outcome != "answered":
            return outcome
        text = texts.decode(sampled_ids[sampled_ids != end_id])
        return "unreadable" if evaluate(text).outcome in _UNREADABLE else "answered"

    return classify


_UNREADABLE = frozenset({"does not parse", "too long", "too deep"})
