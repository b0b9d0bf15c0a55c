"""What attribution reads: answers given in live traffic, and `SIGNALS` feedback events on each, as encoded records.

An answer is as `producers/serving` writes it (1,000 tokens, of which a quarter is the prompt); its content is random, since
nobody opens it here.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Final

import numpy as np

from rollwire.ops.bench.feedback.bare import records
from rollwire.ops.bench.feedback.bodies import SIGNALS, Bodies
from rollwire.ops.bench.streams_load import LINEAGE, MODEL, record_of
from rollwire.schemas.records import ProductionRollout, Seal, Segment, Span
from rollwire.streams.seams.log import Outgoing

EVENTS: Final = 1 + SIGNALS  # of one answer
TENANT: Final = "default"
_TOKENS: Final = 1_000
_PROMPT: Final = 250
_OUTCOMES: Final = ("answered", "answered", "answered", "tool_error")


def answer(bodies: Bodies, number: int, content: bytes, logprobs: bytes) -> ProductionRollout:
    """The answer that events number * SIGNALS, ... of `bodies` are about."""
    sampled = _TOKENS - _PROMPT
    return ProductionRollout(
        rollout_id=bodies.rollout(number),
        group_id=bodies.group(number),
        index=0,
        group_size=1,
        model=MODEL,
        lineage=LINEAGE,
        environment="production",
        task_id="production",
        task="",
        token_ids=content,
        token_dtype="u4",
        segments=(
            Segment(kind="prompt", start=0, end=_PROMPT),
            Segment(kind="sampled", start=_PROMPT, end=_TOKENS),
        ),
        loss_mask=bytes(_PROMPT) + b"\x01" * sampled,
        logprobs=logprobs,
        spans=(Span(version=0, start=0, end=sampled),),
        finish_reason="stop",
        temperature=1.0,
        top_k_experts=0,
        fleet="serving",
        replica="serving-0",
        seed=number,
        started_us=bodies.at_us,
        finished_us=bodies.at_us,
        sealed=Seal(subject=f"{number % 97:032x}", key=0, nonce=bytes(12), tag=bytes(16)),
        outcome=_OUTCOMES[number % len(_OUTCOMES)],
        tenant=TENANT,
    )


def traffic(bodies: Bodies, first: int, answers: int) -> Iterator[list[Outgoing]]:
    """An answer and its feedback at a time: `EVENTS` records."""
    content = secrets.token_bytes(4 * _TOKENS)
    logprobs = (-np.random.default_rng(0).random(_TOKENS - _PROMPT, dtype=np.float32)).astype("<f4").tobytes()
    for number in range(first, first + answers):
        feedback = records(bodies, number * SIGNALS, SIGNALS, bodies.at_us, TENANT, "")
        events = [answer(bodies, number, content, logprobs), *feedback]
        yield [record_of(event, bodies.at_us) for event in events]
