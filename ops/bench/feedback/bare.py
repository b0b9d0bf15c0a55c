"""The baseline of batches: a bare confluent-kafka producer that encodes and sends the same records.

Same client settings as the log adapter's (acks=all, idempotent), same codec, no delivery reports. The records are made before
the clock starts and end when all are acknowledged; one process, one thread.
"""

from __future__ import annotations

import gc
import time
from multiprocessing.connection import Connection as Pipe
from typing import Final

from rollwire.ops.bench.feedback.bodies import SIGNALS, Bodies
from rollwire.ops.bench.feedback.senders import CONTEXT
from rollwire.ops.bench.streams_bare import BareLog
from rollwire.ops.memory import tune_memory
from rollwire.schemas.codec import encode
from rollwire.schemas.errors import DeadlineExceeded, LogUnavailable
from rollwire.schemas.records import Feedback

_SOURCE: Final = "rollwire/bench"
_WAIT_S: Final = 300.0
_FLUSH_S: Final = 60.0
_POLL_EVERY: Final = 500
_SIGNAL: Final = (("thumb", 1.0), ("rating", 0.75), ("edit_survival", 0.5), ("latency_ms", 812.5))


def records(
    bodies: Bodies, first: int, count: int, received_us: int, tenant: str, key_id: str
) -> list[Feedback]:
    """The records that the gateway makes of `bodies.lines(first, count)`."""
    found: list[Feedback] = []
    for number in range(first, first + count):
        signal, value = _SIGNAL[number % SIGNALS]
        rollout = number // SIGNALS
        found.append(
            Feedback(
                feedback_id=f"{bodies.name}-{number}",
                id_source="client",
                tenant=tenant,
                group_id=bodies.group(rollout),
                rollout_id=bodies.rollout(rollout),
                signal=signal,
                value=value,
                label=None,
                happened_us=bodies.at_us,
                received_us=received_us,
                subject="",
                comment=None,
                seal=None,
                dialect="rollwire",
                key_id=key_id,
            )
        )
    return found


def _produce(bootstrap: str, prefix: str, bodies: Bodies, count: int, rounds: int, pipe: Pipe) -> None:
    tune_memory()
    producer = BareLog(bootstrap, prefix, client_id="bench").open_producer()
    topic = f"{prefix}user-feedback"
    producer.list_topics(topic, timeout=30.0)
    rates: list[float] = []
    for number in range(rounds + 1):  # the first one warms up
        most = count if number else count // 10
        made = records(bodies, 0, most, bodies.at_us, "default", "")
        gc.collect()
        began_s = time.perf_counter()
        for at in range(0, most, _POLL_EVERY):
            time_us = time.time_ns() // 1_000
            for event in made[at : at + _POLL_EVERY]:
                one = encode(event, source=_SOURCE, time_us=time_us)
                while True:
                    try:
                        producer.produce(topic, one.value, one.key, headers=list(one.headers))
                        break
                    except BufferError:
                        producer.poll(0.1)
            producer.poll(0)
        if producer.flush(_FLUSH_S):
            raise LogUnavailable(f"the bare producer's records were not acknowledged within {_FLUSH_S:g} s")
        if number:
            rates.append(most / (time.perf_counter() - began_s))
    pipe.send(rates)


def bare_rates(bootstrap: str, prefix: str, bodies: Bodies, count: int, rounds: int) -> list[float]:
    """Events a second of each round, in a process of its own. Raises `DeadlineExceeded`."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(
        target=_produce, args=(bootstrap, prefix, bodies, count, rounds, theirs), daemon=True
    )
    process.start()
    theirs.close()
    try:
        if not ours.poll(_WAIT_S):
            raise DeadlineExceeded(f"the bare producer was not done after {_WAIT_S:g} s")
        return [float(rate) for rate in ours.recv()]
    except EOFError:
        raise DeadlineExceeded("the bare producer died: see what it wrote to standard error") from None
    finally:
        process.kill()
        process.join()
