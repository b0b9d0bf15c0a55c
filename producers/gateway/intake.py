"""The way of one request: who, how much, what, into the log, and the word on every event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Final, NamedTuple

import structlog

from rollwire.producers.gateway.access import Access, Caller, Quotas, Refusal, lacks
from rollwire.producers.gateway.answers import CONFLICT
from rollwire.producers.gateway.body import BodyReader, Receive
from rollwire.producers.gateway.codes import GatewayCode
from rollwire.producers.gateway.commit import CONFLICTING, REPEATED, Committer, Fate
from rollwire.producers.gateway.config import GatewayConfig
from rollwire.producers.gateway.dialects.seam import Answer, Dialect, Said
from rollwire.producers.gateway.encode import Encoder
from rollwire.producers.gateway.head import Head
from rollwire.producers.gateway.inflate import inflate
from rollwire.producers.gateway.judge import Context, Draft, judge
from rollwire.producers.gateway.ledger import Ledger
from rollwire.producers.gateway.records import Entry, sealed_entry
from rollwire.schemas.errors import SealError, StoreError
from rollwire.schemas.pseudonyms import pseudonym_of
from rollwire.schemas.rules import Rules
from rollwire.streams.seams.clock import Clock
from rollwire.streams.seams.keys import KeyStore

_log = structlog.get_logger()

# Events that are judged at a stretch: other requests wait no longer than these take.
_STRETCH: Final = 250
_REMEMBERED: Final = 65_536
_DESKS: Final = 1_024
_SEALERS: Final = 4
_UNSEALED: Final = Refusal(500, "internal", "a comment that waits for its seal")


class Decided(NamedTuple):
    """What became of a request's events, in order. `fates` are those of the entries; () = all are new."""

    results: Sequence[Entry | Refusal]
    fates: Sequence[Fate]


class Intake:
    """Made and used on one event loop. What it answers stands in `ledger`."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        rules: Rules,
        access: Access,
        quotas: Quotas,
        keys: KeyStore,
        secret: bytes,
        clock: Clock,
        committer: Committer,
        ledger: Ledger,
    ) -> None:
        self._config = config
        self._rules = rules
        self._access = access
        self._quotas = quotas
        self._keys = keys
        self._clock = clock
        self._committer = committer
        self._ledger = ledger
        self._reader = BodyReader(config.max_body_bytes, config.body_timeout_s)
        self._held = 0  # bytes of bodies
        self.stopping = False
        self._sealers = ThreadPoolExecutor(_SEALERS, thread_name_prefix="seal")

        @lru_cache(maxsize=_REMEMBERED)
        def pseudonym(tenant: str, subject: str) -> str:
            return pseudonym_of(secret, tenant, subject)

        @lru_cache(maxsize=_DESKS)
        def desk(tenant: str, key_id: str, dialect: str) -> tuple[Context, Encoder]:
            most, skew_us = config.max_comment_bytes, round(config.max_skew_s * 1e6)
            context = Context(tenant, key_id, dialect, secret, pseudonym, most, skew_us)
            return context, Encoder(tenant, key_id, dialect)

        self._desk = desk

    def close(self) -> None:
        self._reader.close()
        self._sealers.shutdown(wait=False, cancel_futures=True)

    async def take(self, dialect: Dialect, head: Head, receive: Receive) -> Answer:
        """The answer to one POST. Raises `Disconnected`."""
        caller = self._access.identify(head.authorization, head.origin, head.address_key)
        if not isinstance(caller, Refusal):
            caller = lacks(caller, "feedback:write") or caller
        if isinstance(caller, Refusal):
            return self._turned_away(dialect, caller, head)
        config = self._config
        size = config.max_body_bytes if head.length is None else min(head.length, config.max_body_bytes)
        if self._held and self._held + size > config.max_bodies_bytes:
            return self._turned_away(
                dialect, self._busy("overloaded", "too many large requests at once"), head
            )
        self._held += size
        try:
            body = await self._reader.read(receive, head.length)
            begun_s = time.monotonic()
            if head.encoding and not isinstance(body, Refusal):
                body = inflate(body, head.encoding, config.max_body_bytes)
            said = (
                body if isinstance(body, Refusal) else dialect.parse(body, head.media_type, config.max_items)
            )
            if isinstance(said, Refusal):
                return self._turned_away(dialect, said, head)
            size_read = len(body)
            del body
            answer = await self._answer(dialect, caller, said, size_read, head, begun_s)
        finally:
            self._held -= size
        self._ledger.latency.observe(time.monotonic() - begun_s)
        return answer

    async def _answer(
        self, dialect: Dialect, caller: Caller, said: Said, size: int, head: Head, begun_s: float
    ) -> Answer:
        """The answer to a request whose events are known, each of them accounted for."""
        events = len(said.items)
        self._ledger.begin(events)
        try:
            decided = await self._decide(dialect, caller, said, size, begun_s)
        except Exception:  # noqa: BLE001 - the edge of a request: whatever fails, it is answered and accounted for
            _log.exception("gateway.failed", request_id=head.request_id)
            decided = Refusal(500, "internal", "a fault of the gateway; its log says more")
        if isinstance(decided, Refusal):
            self._ledger.drop(decided.code, events)
            return dialect.problem(decided, head.request_id)
        self._account(*decided)
        return dialect.answer(said, *decided, head.request_id)

    async def _decide(
        self, dialect: Dialect, caller: Caller, said: Said, size: int, begun_s: float
    ) -> Decided | Refusal:
        results = await self._judge(dialect, caller, said, size, begun_s)
        if isinstance(results, Refusal):
            return results
        entries = [result for result in results if not isinstance(result, Refusal)]
        if not entries:
            return Decided(results, ())
        fates = await self._committer.submit(entries, size, begun_s + self._config.deadline_s)
        if fates is None:
            detail = "not acknowledged in time; sending the same ids again is harmless"
            return self._busy("outcome_unknown", detail)
        return Decided(results, fates)

    async def _judge(
        self, dialect: Dialect, caller: Caller, said: Said, size: int, begun_s: float
    ) -> list[Entry | Refusal] | Refusal:
        """Each event as an entry or its refusal; a refusal of the whole request where it cannot be served now."""
        events = len(said.items)
        retry_after_s = self._quotas.take(caller, events, begun_s)
        if retry_after_s is not None:
            detail = f"the key's quota: {caller.rate:g} events/s, {caller.burst} at once"
            return Refusal(429, "quota_exceeded", detail, "", retry_after_s)
        turned_away = "stopping" if self.stopping else self._committer.turns_away(events, size, begun_s)
        if turned_away is not None:
            return self._busy(turned_away, "nothing was written")
        context, encoder = self._desk(caller.tenant, caller.key_id, dialect.name)
        now_us = self._clock.now_us()
        encoder.received(now_us)
        rules = self._rules
        results: list[Entry | Refusal] = []
        unsealed: list[tuple[int, Draft]] = []
        for index, item in enumerate(said.items):
            draft = item if isinstance(item, Refusal) else judge(item, context, rules, now_us)
            if isinstance(draft, Refusal):
                results.append(draft)
            elif draft.comment is None:
                record = encoder.record(draft)
                results.append(
                    Entry((context.tenant, draft.feedback_id), draft.digest, draft.id_source, record)
                )
            else:
                unsealed.append((index, draft))
                results.append(_UNSEALED)
            if index % _STRETCH == _STRETCH - 1:
                await asyncio.sleep(0)
                encoder.received(now_us)  # another request may have said another time
        if unsealed:
            seal = partial(self._seal, [draft for _, draft in unsealed], context, now_us)
            try:
                sealed = await asyncio.get_running_loop().run_in_executor(self._sealers, seal)
            except (StoreError, SealError) as error:
                _log.warning("gateway.not_sealed", error=str(error))
                return self._busy("unavailable", "the key store does not answer; nothing was written")
            for (index, _), entry in zip(unsealed, sealed, strict=True):
                results[index] = entry
        return results

    def _seal(self, drafts: Sequence[Draft], context: Context, now_us: int) -> list[Entry]:
        """On another thread: a person who is new costs the key store's time."""
        return [sealed_entry(draft, context, now_us, self._keys.data_key(draft.subject)) for draft in drafts]

    def _account(self, results: Sequence[Entry | Refusal], fates: Sequence[Fate]) -> None:
        ledger = self._ledger
        repeated = conflicting = refused = 0
        for fate in fates:
            repeated += fate == REPEATED
            conflicting += fate == CONFLICTING
        for result in results:
            if isinstance(result, Refusal):
                refused += 1
                ledger.refuse(result.code)
        if conflicting:
            ledger.refuse(CONFLICT.code, conflicting)
        ledger.accept(len(results) - refused - conflicting, repeated)

    def _turned_away(self, dialect: Dialect, refusal: Refusal, head: Head) -> Answer:
        """A request that was not read, or not understood, counts as one event."""
        self._ledger.begin(1)
        if refusal.status == 429 or refusal.status >= 500:
            self._ledger.drop(refusal.code, 1)
        else:
            self._ledger.refuse(refusal.code)
        return dialect.problem(refusal, head.request_id)

    def _busy(self, code: GatewayCode, detail: str) -> Refusal:
        return Refusal(503, code, detail, "", self._config.retry_after_s)
