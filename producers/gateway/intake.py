"""The way of one request: who, how much, what, into the log, and the word on every event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Final

import structlog

from rollwire.producers.gateway.access import Access, Caller, Quotas, Refusal, lacks
from rollwire.producers.gateway.answers import CONFLICT
from rollwire.producers.gateway.body import BodyReader, Receive
from rollwire.producers.gateway.codes import GatewayCode
from rollwire.producers.gateway.commit import CONFLICTING, REPEATED, Committer, Fate
from rollwire.producers.gateway.config import GatewayConfig
from rollwire.producers.gateway.dialects.seam import Answer, Dialect, Said
from rollwire.producers.gateway.encode import Encoder
from rollwire.producers.gateway.faults import fault_of
from rollwire.producers.gateway.head import Head
from rollwire.producers.gateway.inflate import inflate
from rollwire.producers.gateway.item import Parsed
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
_UNSEALED: Final = Refusal(500, "internal", "a comment that waits for its seal")
_DESKS: Final = 1_024
_SEALERS: Final = 4


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
        self._reader = BodyReader(
            config.max_body_bytes,
            config.max_bodies_bytes,
            config.body_timeout_s,
            self._busy("overloaded", "too many large requests at once"),
        )
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
        body = await self._reader.read(receive, head.length, caller)
        begun_s = time.monotonic()
        if isinstance(body, Refusal):
            return self._turned_away(dialect, body, head)
        size = len(body)
        try:
            inflated = inflate(body, head.encoding, config.max_body_bytes) if head.encoding else body
            del body
            said = (
                inflated
                if isinstance(inflated, Refusal)
                else dialect.parse(inflated, head.media_type, config.max_items)
            )
            if isinstance(said, Refusal):
                return self._turned_away(dialect, said, head)
            size_read = len(inflated)
            del inflated
            answer = await self._answer(dialect, caller, said, size_read, head, begun_s)
        finally:
            self._reader.done(size, caller)
        self._ledger.latency.observe(time.monotonic() - begun_s)
        return answer

    async def _answer(
        self, dialect: Dialect, caller: Caller, said: Said, size: int, head: Head, begun_s: float
    ) -> Answer:
        """The answer to a request whose events are known, each of them accounted for."""
        events = len(said.items)
        self._ledger.begin(events)
        results: list[Entry | Refusal] = []
        try:
            fates = self._turns_away(caller, events, size, begun_s) or await self._decide(
                dialect, caller, said, size, begun_s, results
            )
        except Exception as error:  # noqa: BLE001 - the edge of a request: whatever fails, it is answered and accounted for
            _log.error("gateway.failed", request_id=head.request_id, **fault_of(error))
            fates = Refusal(500, "internal", "a fault of the gateway; its log says more")
        if isinstance(fates, Refusal):
            self._ledger.drop(fates.code, events)
            return dialect.problem(fates, head.request_id)
        self._account(results, fates)
        return dialect.answer(said, results, fates, head.request_id)

    def _turns_away(self, caller: Caller, events: int, size: int, begun_s: float) -> Refusal | None:
        """Why the whole request cannot be served now; None = it can."""
        retry_after_s = self._quotas.take(caller, events, begun_s)
        if retry_after_s is not None:
            detail = f"the key's quota: {caller.rate:g} events/s, {caller.burst} at once"
            return Refusal(429, "quota_exceeded", detail, "", retry_after_s)
        why = "stopping" if self.stopping else self._committer.turns_away(events, size, begun_s)
        return None if why is None else self._busy(why, "nothing was written")

    async def _decide(
        self,
        dialect: Dialect,
        caller: Caller,
        said: Said,
        size: int,
        begun_s: float,
        results: list[Entry | Refusal],
    ) -> Sequence[Fate] | Refusal:
        """Each event in the log, or refused: `results` gets the word on each; the fates of those that were not refused."""
        context, encoder = self._desk(caller.tenant, caller.key_id, dialect.name)
        now_us = self._clock.now_us()
        drafts: list[tuple[int, Draft]] = []
        items = said.items
        for start in range(0, len(items), _STRETCH):
            if start:
                await asyncio.sleep(0)
            stretch = items if len(items) <= _STRETCH else items[start : start + _STRETCH]
            self._judge(stretch, context, encoder, now_us, results, drafts)
        if drafts:
            try:
                await self._seal(drafts, context, now_us, results, begun_s + self._config.deadline_s)
            except (StoreError, SealError, TimeoutError) as error:
                _log.warning("gateway.not_sealed", error=str(error))
                return self._busy("unavailable", "the key store does not answer; nothing was written")
        entries = [result for result in results if isinstance(result, Entry)]
        if not entries:
            return ()
        fates = await self._committer.submit(entries, size, begun_s + self._config.deadline_s)
        if fates is None:
            detail = "not acknowledged in time; sending the same ids again is harmless"
            return self._busy("outcome_unknown", detail)
        return fates

    def _judge(
        self,
        items: Sequence[Parsed],
        context: Context,
        encoder: Encoder,
        now_us: int,
        results: list[Entry | Refusal],
        drafts: list[tuple[int, Draft]],
    ) -> None:
        """Adds the entry of each item, or its refusal. One with a comment to seal is a draft, with its place in `results`."""
        encoder.received(now_us)
        rules, tenant = self._rules, context.tenant
        for item in items:
            draft = item if isinstance(item, Refusal) else judge(item, context, rules, now_us)
            if isinstance(draft, Refusal):
                results.append(draft)
            elif draft.comment is None:
                key = (tenant, draft.feedback_id)
                results.append(Entry(key, draft.digest, draft.id_source, encoder.record(draft)))
            else:
                drafts.append((len(results), draft))
                results.append(_UNSEALED)

    async def _seal(
        self,
        drafts: Sequence[tuple[int, Draft]],
        context: Context,
        now_us: int,
        results: list[Entry | Refusal],
        ends_s: float,
    ) -> None:
        """Puts entries in the drafts' places. On another thread: a person who is new costs the key store's time.
        Raises `TimeoutError` at the moment `ends_s`."""

        def seal() -> list[Entry]:
            entries: list[Entry] = []
            for _, draft in drafts:
                if time.monotonic() > ends_s:
                    raise TimeoutError(f"{len(entries)} of {len(drafts)} comments were sealed in time")
                entries.append(sealed_entry(draft, context, now_us, self._keys.data_key(draft.subject)))
            return entries

        async with asyncio.timeout(ends_s - time.monotonic()):
            sealed = await asyncio.get_running_loop().run_in_executor(self._sealers, seal)
        for (index, _), entry in zip(drafts, sealed, strict=True):
            results[index] = entry

    def _account(self, results: Sequence[Entry | Refusal], fates: Sequence[Fate]) -> None:
        ledger = self._ledger
        if not fates and len(results) == 1 and type(results[0]) is Entry:
            ledger.accept(1, 0)
            return
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
