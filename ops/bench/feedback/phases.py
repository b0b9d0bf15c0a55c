"""The phases of load on one gateway: singles against an empty answer, batches against a bare producer, half the maximum, and faults.

All load is open loop but where the maximum is sought. Every phase has events of its own, whose ids are kept for the ledger.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final, NamedTuple

from rollwire.ops.bench.feedback.bare import bare_rates
from rollwire.ops.bench.feedback.bodies import Bodies
from rollwire.ops.bench.feedback.generator import Outcome, Plan, Rate
from rollwire.ops.bench.feedback.latency import merged, percentile_ms
from rollwire.ops.bench.feedback.ledger import Acknowledged, acknowledged
from rollwire.ops.bench.feedback.senders import Senders, send
from rollwire.ops.bench.feedback.server import ServerProcess
from rollwire.ops.figures import Figure
from rollwire.ops.stack import StackInfo, kill_service, read_stack, up
from rollwire.ops.stack.ports import HOST
from rollwire.schemas.errors import DeadlineExceeded

PATH: Final = "/v1/feedback"
BATCH: Final = 500
FAULTS: Final = ("burst", "flood", "broker", "redis", "kill")


class Sizes(NamedTuple):
    """How long, and how much. Seconds but where it says otherwise."""

    connections: tuple[int, ...]  # at which the maximum of singles is sought
    batch_connections: tuple[int, ...]
    rounds: int
    single_s: float
    batch_s: float
    bare_events: int  # of a round
    steady_s: float
    burst_s: float
    around_burst_s: float  # at a tenth of its rate, before and after it
    flood_s: float
    fault_s: float  # before and after each fault
    broker_pause_s: float


FULL: Final = Sizes((64, 256), (4, 8), 2, 4.0, 3.0, 100_000, 30.0, 60.0, 5.0, 3.0, 5.0, 10.0)
QUICK: Final = Sizes((256,), (4,), 1, 1.0, 1.0, 10_000, 3.0, 2.0, 1.0, 1.0, 1.0, 2.0)


def steps(sizes: Sizes) -> int:
    """How many words a run reports."""
    rounds = sizes.rounds * (2 * len(sizes.connections) + len(sizes.batch_connections))
    return rounds + 2 + len(FAULTS)


# Connections of the open-loop phases: more than ever wait at half the maximum; more events than the gateway's queue holds do not fit.
_STEADY: Final = 256
_CROWD: Final = 1_024
_ANSWER_S: Final = 15.0
_BURST_SHARE: Final = 8  # ten times the maximum over this is a quarter more than it can take
_FLOOD: Final = 3  # times what it takes in batches
_IMPATIENT: Final = 0.4  # of the broker's pause, callers wait for an answer
_FAULT_SHARE: Final = 0.2  # of the maximum


class Load:
    """Sends phases at one gateway and keeps what was acknowledged."""

    def __init__(
        self, gateway: ServerProcess, headers: tuple[tuple[str, str], ...], report: Callable[[str], None]
    ) -> None:
        self.gateway = gateway
        self.report = report
        self._headers = headers
        self.phases: list[Acknowledged] = []
        self.under_faults: list[tuple[Bodies, int]] = []  # and how many events were sent

    def events(self) -> int:
        """Answered with a 2xx, over all phases."""
        return sum(len(phase.firsts) * phase.batch for phase in self.phases)

    def plan(
        self,
        name: str,
        rates: Sequence[Rate],
        connections: int,
        batch: int = 1,
        patience_s: float = 60.0,
        prepared: int = 0,
    ) -> Plan:
        return Plan(
            HOST,
            self.gateway.port,
            PATH,
            self._headers,
            connections,
            tuple(rates),
            Bodies(name, time.time_ns() // 1_000),
            batch=batch,
            answer_s=_ANSWER_S,
            patience_s=patience_s,
            seed=len(self.phases),
            prepared=prepared,
        )

    def run(self, plan: Plan, meanwhile: Callable[[], None] = lambda: None) -> Outcome:
        """`meanwhile` runs in this thread, from the word to go on."""
        bodies = plan.bodies
        name = "" if bodies is None else bodies.name
        self.report(name)
        with Senders([plan]) as senders:
            senders.go()
            meanwhile()
            (outcome,) = senders.outcomes()
        self.phases.append(acknowledged(name, outcome, plan.batch))
        if bodies is not None and name in FAULTS:
            self.under_faults.append((bodies, outcome.asked * plan.batch))
        return outcome


def single_figures(load: Load, empty: ServerProcess, sizes: Sizes) -> tuple[list[Figure], float]:
    """Singles against the same server's empty 204, in turns, each at its best number of connections; and the maximum."""
    ours: dict[int, list[float]] = {count: [] for count in sizes.connections}
    bare: dict[int, list[float]] = {count: [] for count in sizes.connections}
    rates = (Rate(0, sizes.single_s),)
    for number in range(sizes.rounds):
        for count in sizes.connections:
            load.report(f"empty-{count}-{number}")
            plan = load.plan(f"empty-{count}-{number}", rates, count)._replace(port=empty.port)
            bare[count].append(send([plan])[0].per_s)
            ours[count].append(load.run(load.plan(f"single-{count}-{number}", rates, count)).per_s)
    best, best_bare = _best(ours), _best(bare)
    return [
        Figure(name="feedback.single_ratio", value=best / best_bare, unit="x"),
        Figure(name="feedback.single_per_s", value=best, unit="1/s", baseline=best_bare),
    ], best


def batch_figures(load: Load, bootstrap: str, bare_prefix: str, sizes: Sizes) -> tuple[list[Figure], float]:
    """Batches of `BATCH` against a bare producer of the same records; and the maximum, events a second."""
    load.report("bare producer")
    bodies = Bodies("bare", time.time_ns() // 1_000)
    bare = bare_rates(bootstrap, bare_prefix, bodies, sizes.bare_events, sizes.rounds + 1)
    rates = (Rate(0, sizes.batch_s),)
    ours: dict[int, list[float]] = {count: [] for count in sizes.batch_connections}
    for number in range(sizes.rounds):
        for count in sizes.batch_connections:
            plan = load.plan(
                f"batch-{count}-{number}", rates, count, BATCH, prepared=round(100 * sizes.batch_s)
            )
            ours[count].append(load.run(plan).per_s * BATCH)
    best, baseline = _best(ours), median(bare)
    return [
        Figure(name="feedback.batch_ratio", value=best / baseline, unit="x"),
        Figure(name="feedback.batch_per_s", value=best, unit="1/s", baseline=baseline),
    ], best


def steady_figures(load: Load, maximum: float, sizes: Sizes) -> list[Figure]:
    """Singles at half the maximum, from the planned time."""
    outcome = load.run(load.plan("steady", (Rate(maximum / 2, sizes.steady_s),), _STEADY))
    histogram = merged([outcome.histogram])
    return [
        Figure(name="feedback.p50_ms", value=percentile_ms(histogram, 50), unit="ms"),
        Figure(name="feedback.p99_ms", value=percentile_ms(histogram, 99), unit="ms"),
        Figure(name="feedback.p999_ms", value=percentile_ms(histogram, 99.9), unit="ms"),
        Figure(name="feedback.max_ms", value=percentile_ms(histogram, 100), unit="ms"),
        Figure(name="feedback.late_sends", value=outcome.late, unit="asks"),
        Figure(name="feedback.steady_per_s", value=outcome.asked / outcome.seconds, unit="1/s"),
    ]


def burst_figures(load: Load, maximum: float, sizes: Sizes) -> list[Figure]:
    """From an eighth of the maximum to ten times that, and back: a quarter more than it can take, so that a queue grows for as
    long as the burst lasts, and is gone again soon after."""
    base = maximum / _BURST_SHARE
    rates = (
        Rate(base, sizes.around_burst_s),
        Rate(10 * base, sizes.burst_s),
        Rate(base, sizes.around_burst_s),
    )
    outcome = load.run(load.plan("burst", rates, _CROWD))
    return [
        *_fault_figures("burst", outcome),
        Figure(name="feedback.burst.per_s", value=outcome.per_s, unit="1/s"),
    ]


def flood_figures(load: Load, maximum: float, sizes: Sizes) -> list[Figure]:
    """Batches, `_FLOOD` times as many as it takes (`maximum` events a second): more than its queue holds, so that it sheds."""
    rate = Rate(_FLOOD * maximum / BATCH, sizes.flood_s)
    asks = round(rate.per_s * rate.seconds)
    outcome = load.run(load.plan("flood", (rate,), _STEADY, BATCH, prepared=asks))
    shed = sum(count for status, count in outcome.statuses.items() if status in (429, 503))
    return [
        *_fault_figures("flood", outcome),
        Figure(name="feedback.flood.shed", value=shed, unit="asks"),
    ]


def broker_figures(load: Load, stack: StackInfo, maximum: float, sizes: Sizes) -> list[Figure]:
    """The broker stands still, for longer than callers wait: they ask again under the same ids while their first try is still
    under way. Nothing is acknowledged meanwhile, nothing is there twice afterwards."""

    def pause() -> None:
        pid = read_stack(stack.dir).services["kafka"].pid
        _wait(sizes.fault_s)
        os.kill(pid, signal.SIGSTOP)
        try:
            _wait(sizes.broker_pause_s)
        finally:
            os.kill(pid, signal.SIGCONT)

    seconds = 2 * sizes.fault_s + sizes.broker_pause_s
    plan = load.plan("broker", (Rate(_FAULT_SHARE * maximum, seconds),), _CROWD)
    return _fault_figures(
        "broker", load.run(plan._replace(answer_s=_IMPATIENT * sizes.broker_pause_s), pause)
    )


def redis_figures(load: Load, stack: StackInfo, maximum: float, sizes: Sizes) -> list[Figure]:
    """Redis is killed, and started again at the end: quotas and repeats are then the gateway's own."""

    def kill() -> None:
        _wait(sizes.fault_s)
        kill_service(stack, "redis")
        _wait(sizes.fault_s)
        up(stack.config)

    return _fault_figures("redis", _fault(load, "redis", maximum, 3 * sizes.fault_s, kill))


def kill_figures(load: Load, maximum: float, sizes: Sizes) -> list[Figure]:
    """The gateway is killed and started again: what was under way has no answer, and is asked again."""
    back: list[float] = []

    def kill() -> None:
        _wait(sizes.fault_s)
        load.gateway.kill()
        back.append(load.gateway.start())

    outcome = _fault(load, "kill", maximum, 2 * sizes.fault_s + 5.0, kill)
    if not outcome.unknown:
        raise DeadlineExceeded(
            "the gateway was killed, and no ask was without an answer: the fault did not hit"
        )
    return [
        *_fault_figures("kill", outcome),
        Figure(name="feedback.kill.start_s", value=back[0], unit="s"),
    ]


def _fault(load: Load, name: str, maximum: float, seconds: float, strike: Callable[[], None]) -> Outcome:
    return load.run(load.plan(name, (Rate(_FAULT_SHARE * maximum, seconds),), _CROWD), strike)


def _fault_figures(name: str, outcome: Outcome) -> list[Figure]:
    histogram = merged([outcome.histogram])
    prefix = f"feedback.{name}"
    return [
        Figure(name=f"{prefix}.asked", value=outcome.asked, unit="asks"),
        Figure(name=f"{prefix}.p50_ms", value=percentile_ms(histogram, 50), unit="ms"),
        Figure(name=f"{prefix}.p99_ms", value=percentile_ms(histogram, 99), unit="ms"),
        Figure(name=f"{prefix}.max_ms", value=percentile_ms(histogram, 100), unit="ms"),
        Figure(name=f"{prefix}.tries_again", value=outcome.tries - outcome.asked, unit="asks"),
        Figure(name=f"{prefix}.given_up", value=outcome.given_up, unit="asks"),
    ]


def _best(rates: dict[int, list[float]]) -> float:
    return max(median(found) for found in rates.values())


def _wait(seconds: float) -> None:
    threading.Event().wait(seconds)
