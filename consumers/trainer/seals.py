"""Opening what is sealed in a plan: the tokens of live traffic, as the trainer needs them. Needs no torch.

A sequence whose person was erased is left out of its microbatch whole, and so is one whose seal does not fit: no trainer
of this lineage will ever read it again. The loss is still divided by the plan's total, so the others count as they did.

What was erased only grows. So a replay that leaves out as many sequences of a step as the step itself did leaves out the
same ones, and gives the same bits; one that leaves out more cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from rollwire.kernels.seal import open_sealed, place_of
from rollwire.schemas.errors import ConfigError, Erased, SealInvalid
from rollwire.schemas.records import Microbatch, PackedBatch
from rollwire.streams.seams.keys import KeyStore
from rollwire.streams.seams.sealing import OpenKeys

_log = structlog.get_logger()
_TOKEN_BYTES: Final = 4  # u4, in the clear and sealed
_FEW: Final = 4  # keys that no threads are started for
_AT_ONCE: Final = 16

DataKeys = Mapping[tuple[str, int], bytes | None]
"""By person and generation; None = erased."""


class Opened(NamedTuple):
    batch: PackedBatch  # nothing in it is sealed
    sealed: int  # sequences that were sealed: those of live traffic
    left_out: int  # of them, those whose person was erased, or whose seal does not fit


class SealOpener:
    """Asks for the key store when the first seal comes: a trainer without live traffic needs none."""

    def __init__(self, open_keys: OpenKeys | None) -> None:
        self._open_keys = open_keys
        self._keys: KeyStore | None = None

    def opened(self, batch: PackedBatch) -> Opened:
        """Raises `ConfigError` where there is no key store, `KeyMissing` where it is another one, `StoreUnavailable`."""
        if not any(micro.seals for micro in batch.microbatches):
            return Opened(batch, 0, 0)
        if self._keys is None:
            if self._open_keys is None:
                raise ConfigError(
                    f"the plan of step {batch.step} holds sealed tokens of live traffic, and no key store was handed in: "
                    "give `keys`"
                )
            self._keys = self._open_keys()
        return open_batch(batch, self._keys)


def open_batch(batch: PackedBatch, keys: KeyStore) -> Opened:
    """The plan in the clear. Errors as `SealOpener.opened`."""
    data_keys = _data_keys(batch, keys)
    micros = [_open_microbatch(micro, data_keys) for micro in batch.microbatches]
    left_out = sum(
        len(before.rollout_ids) - len(after.rollout_ids)
        for before, after in zip(batch.microbatches, micros, strict=True)
    )
    sealed = sum(seal is not None for micro in batch.microbatches for seal in micro.seals)
    return Opened(msgspec.structs.replace(batch, microbatches=tuple(micros)), sealed, left_out)


def _data_keys(batch: PackedBatch, keys: KeyStore) -> DataKeys:
    """Of everybody in the plan, several at a time: each may cost a call to a store."""
    seals = (seal for micro in batch.microbatches for seal in micro.seals if seal is not None)
    wanted = list(dict.fromkeys((seal.subject, seal.key) for seal in seals))

    def fetched(who: tuple[str, int]) -> bytes | None:
        try:
            return keys.key_of(*who)
        except Erased:
            return None

    if len(wanted) <= _FEW:
        return dict(zip(wanted, map(fetched, wanted), strict=True))
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="data-keys") as pool:
        return dict(zip(wanted, pool.map(fetched, wanted), strict=True))


def _open_microbatch(micro: Microbatch, data_keys: DataKeys) -> Microbatch:
    if not micro.seals:
        return micro
    cu_seqlens = np.frombuffer(micro.cu_seqlens, "<i4")
    tokens: list[bytes | None] = []  # by sequence; None = left out
    for index, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        held = micro.token_ids[start * _TOKEN_BYTES : end * _TOKEN_BYTES]
        seal, rollout_id = micro.seals[index], micro.rollout_ids[index]
        if seal is None:
            tokens.append(held)
            continue
        key = data_keys[seal.subject, seal.key]
        if key is None:
            _log.info("trainer.erased", rollout=rollout_id, subject=seal.subject, generation=seal.key)
            tokens.append(None)
            continue
        place = place_of(rollout_id, "token_ids")
        try:
            tokens.append(open_sealed(key, held, nonce=seal.nonce, tag=seal.tag, aad=place))
        except SealInvalid as error:
            _log.error("trainer.seal_invalid", rollout=rollout_id, subject=seal.subject, error=str(error))
            tokens.append(None)
    return _only(micro, tokens)


def _only(micro: Microbatch, tokens: list[bytes | None]) -> Microbatch:
    """The sequences that have tokens, in order, with these tokens."""
    keep = [index for index, one in enumerate(tokens) if one is not None]
    cu_seqlens = np.frombuffer(micro.cu_seqlens, "<i4")
    mask_T = np.frombuffer(micro.loss_mask, "u1")
    trained = np.concatenate([[0], np.cumsum(mask_T != 0)])[cu_seqlens]  # [B + 1], of S
    lengths = np.diff(cu_seqlens)[keep]

    def cut(data: bytes, bounds: NDArray[np.integer[Any]], width: int) -> bytes:
        return b"".join(data[int(bounds[b]) * width : int(bounds[b + 1]) * width] for b in keep)

    sequences = np.arange(len(tokens) + 1)
    return msgspec.structs.replace(
        micro,
        rollout_ids=tuple(micro.rollout_ids[b] for b in keep),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype("<i4").tobytes(),
        token_ids=b"".join(one for one in tokens if one is not None),
        loss_mask=cut(micro.loss_mask, cu_seqlens, 1),
        logprobs=cut(micro.logprobs, trained, 4),
        versions=cut(micro.versions, trained, 8),
        advantages=cut(micro.advantages, sequences, 4),
        traces=tuple(micro.traces[b] for b in keep),
        environments=tuple(micro.environments[b] for b in keep) if micro.environments else (),
        fleets=tuple(micro.fleets[b] for b in keep) if micro.fleets else (),
        seals=(),
    )
