"""Quotas over all gateways of a deployment, spent from blocks that are leased ahead: no request waits for Redis.

A key has one token bucket in Redis. A gateway holds a block of its tokens (`block_s` of its rate) and asks for the next one
when half is gone. Where it holds nothing, it lets requests pass at once and has them charged with the next lease: it runs
ahead of the shared bucket by one burst at most, for one round trip, and what ran ahead is paid back. So the rate is exact over
time, and the burst is exact within one burst a gateway. While Redis is away each gateway counts by itself: n gateways then
let n times the quota pass.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import structlog
from pydantic import BaseModel, ConfigDict, Field

from rollwire.producers.gateway.access import Caller, LocalQuotas
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.hints import Hints, Lease, Leased

_logger = structlog.get_logger("rollwire.gateway")
_SOON_S: Final = 0.05  # until the answer to a lease is there


class QuotasConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    block_s: float = Field(
        default=0.2, gt=0, le=10, description="a leased block, in seconds of the key's rate"
    )
    probe_s: float = Field(
        default=0.5, gt=0, description="how often an absent Redis is asked whether it is back"
    )


@dataclass
class Account:
    """What one gateway holds and owes of one key's quota. Pure: time is an argument."""

    rate: float
    burst: int
    block: int
    held: float = 0.0  # leased, not spent
    debt: float = 0.0  # spent, not charged
    told: float = 0.0  # the part of it that a lease on its way charges
    closed_until_s: float = 0.0  # the shared bucket was empty, and is so until then

    def take(self, n: int, now_s: float) -> float | None:
        if self.held >= n:
            self.held -= n
            return None
        if now_s < self.closed_until_s:
            return self.closed_until_s - now_s
        unpaid = self.debt + self.told
        if unpaid > 0 and unpaid + n > self.burst:
            return _SOON_S
        self.debt += n - self.held
        self.held = 0.0
        return None

    @property
    def wants(self) -> bool:
        return self.debt > 0 or self.held * 2 < self.block

    def tell(self, name: str) -> Lease:
        self.told, self.debt = self.debt, 0.0
        return Lease(name, self.rate, self.burst, self.told, max(0, self.block - int(self.held)))

    def answered(self, leased: Leased, now_s: float) -> None:
        self.told = 0.0
        self.held += leased.granted
        if not leased.granted:
            self.closed_until_s = now_s + leased.wait_s

    def lost(self) -> None:
        self.held = self.debt = self.told = self.closed_until_s = 0.0


class LeasedQuotas:
    """`Quotas` by `hints`. `take` is for one thread; a thread of its own leases, `close` ends it."""

    def __init__(self, hints: Hints, config: QuotasConfig, clock: Clock) -> None:
        self._hints = hints
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._accounts: dict[str, Account] = {}
        self._asking: set[str] = set()
        self._local: LocalQuotas | None = None  # while nobody answers
        self._wake = threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="gateway-quotas", daemon=True)
        self._thread.start()

    @property
    def shared(self) -> bool:
        """Whether quotas are counted over all gateways; False = by this one alone."""
        return self._local is None

    def take(self, caller: Caller, n: int, now_s: float) -> float | None:
        with self._lock:
            if self._local is not None:
                return self._local.take(caller, n, now_s)
            account = self._account(caller)
            wait_s = account.take(n, now_s)
            if now_s >= account.closed_until_s and account.wants and caller.key_id not in self._asking:
                self._asking.add(caller.key_id)
                self._wake.set()
        return wait_s

    def close(self) -> None:
        self._stop = True
        self._wake.set()
        self._thread.join()

    def _account(self, caller: Caller) -> Account:
        account = self._accounts.get(caller.key_id)
        if account is None or (account.rate, account.burst) != (caller.rate, caller.burst):
            block = max(1, min(caller.burst, round(caller.rate * self._config.block_s)))
            account = self._accounts[caller.key_id] = Account(caller.rate, caller.burst, block)
        return account

    def _run(self) -> None:
        while not self._stop:
            self._wake.wait(None if self.shared else self._config.probe_s)
            self._wake.clear()
            with self._lock:
                accounts = {name: self._accounts[name] for name in self._asking}
                self._asking.clear()
                leases = [account.tell(name) for name, account in accounts.items()]
            if self.shared and not leases:
                continue
            # Nothing asked for, nothing spent: whether anybody answers.
            answers = self._hints.lease(leases or [Lease("", 1.0, 1, 0.0, 0)])
            with self._lock:
                self._settle(accounts, answers)

    def _settle(self, accounts: Mapping[str, Account], answers: list[Leased] | None) -> None:
        if answers is None:
            if self._local is None:
                _logger.warning(
                    "gateway.quotas_alone", detail="Redis does not answer: each gateway counts by itself"
                )
                self._local = LocalQuotas()
                for account in self._accounts.values():
                    account.lost()
            return
        if self._local is not None:
            self._local = None
            _logger.info("gateway.quotas_shared")
        now_s = self._clock.monotonic_s()
        for account, leased in zip(accounts.values(), answers, strict=False):
            account.answered(leased, now_s)
