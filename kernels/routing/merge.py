"""The routing trace of a rollout, from what an engine returned turn by turn.

Row t holds the experts used when token t was an input. Engines return one row for every token they processed, so the last
sampled token of a turn has none until the next turn feeds it back; a later turn, or a request resumed after a swap,
returns earlier rows once more. The merged trace keeps, for each row, the first that was recorded, since it is what the
tokens were sampled with; a row that nobody recorded is missing and is never made of zeros: expert 0 is an expert.

Legend: R rows of one turn, N rows merged, L layers, K experts a token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.schemas.errors import ConfigError
from rollwire.schemas.routes import NOT_RECORDED, Ids


class Merged(NamedTuple):
    """Rows [0, N) of a rollout."""

    ids_NLK: NDArray[np.int32]  # NOT_RECORDED throughout a (row, layer) that nobody recorded
    recorded_N: NDArray[np.bool_]  # of any layer
    versions_N: NDArray[np.int64]  # policy version of each row; -1 where it was not recorded


class RouteMerge:
    """Grows turn by turn. `rows` is where what was returned so far ends."""

    def __init__(self) -> None:
        self._ids: list[NDArray[np.int32]] = []
        self._versions: list[NDArray[np.int64]] = []
        self.rows = 0

    @property
    def empty(self) -> bool:
        """No turn returned any row."""
        return self.rows == 0

    def add(
        self,
        ids_RLK: Ids,
        *,
        start_row: int | None,
        tokens: int,
        last_row: bool,
        versions: NDArray[np.int64] | int,
    ) -> None:
        """The rows of one turn, which ends at `tokens` tokens.

        `start_row` None says that they are the new rows alone: exactly those that follow the ones at hand. `last_row`:
        a row of the turn's last token is among them. `versions` of each row, or of all. Raises `ConfigError`, and
        changes nothing, where the rows do not end at the last token or the one before it, as told (C17), have no start
        and are more than the new tokens (C19), or have another shape than those of the turn before.
        """
        if ids_RLK.ndim != 3:
            raise ConfigError(f"routes of shape {ids_RLK.shape}, expected [rows, layers, experts a token]")
        rows = ids_RLK.shape[0]
        end = tokens if last_row else tokens - 1
        if start_row is None:
            if rows > tokens - self.rows:
                raise ConfigError(
                    f"{rows} rows of routes without a start, for {tokens - self.rows} new tokens: which rows are they?"
                )
            start_row = self.rows
        if start_row < 0 or start_row + rows != end:
            raise ConfigError(f"{rows} rows of routes, expected {end - max(start_row, 0)}")
        if self._ids and ids_RLK.shape[1:] != self._ids[0].shape[1:]:
            raise ConfigError(f"routes of shape {ids_RLK.shape[1:]} after {self._ids[0].shape[1:]}")
        self._take(ids_RLK.astype(np.int32), start_row, np.broadcast_to(np.asarray(versions, np.int64), rows))

    def _take(self, ids_RLK: NDArray[np.int32], start: int, versions_R: NDArray[np.int64]) -> None:
        if start > self.rows:  # rows that nobody returned
            gap = start - self.rows
            self._ids.append(np.full((gap, *ids_RLK.shape[1:]), NOT_RECORDED, np.int32))
            self._versions.append(np.full(gap, -1, np.int64))
            self.rows = start
        self._fill(ids_RLK, start, versions_R)
        fresh = self.rows - start
        if fresh < len(ids_RLK):
            self._ids.append(ids_RLK[fresh:])
            self._versions.append(_of_recorded(ids_RLK[fresh:], versions_R[fresh:]))
            self.rows = start + len(ids_RLK)

    def _fill(self, ids_RLK: NDArray[np.int32], start: int, versions_R: NDArray[np.int64]) -> None:
        """Where earlier turns have holes, what this one returned for them."""
        at = 0
        for index, (held, versions) in enumerate(zip(self._ids, self._versions, strict=True)):
            low, high = max(start, at), min(start + len(ids_RLK), at + len(held))
            if low < high and (held[low - at : high - at] < 0).any():
                part, again = slice(low - at, high - at), slice(low - start, high - start)
                filled, dated = held.copy(), versions.copy()
                missing = filled[part] < 0
                filled[part] = np.where(missing, ids_RLK[again], filled[part])
                new_R = missing.any(axis=(1, 2)) & (dated[part] < 0)
                dated[part] = np.where(new_R, _of_recorded(ids_RLK[again], versions_R[again]), dated[part])
                self._ids[index], self._versions[index] = filled, dated
            at += len(held)

    def merged(self, rows: int) -> Merged:
        """Rows [0, `rows`): cut there, or missing from the end of what was returned. Raises `ConfigError` if empty."""
        if self.empty:
            raise ConfigError("no turn returned routes")
        ids = self._ids[0] if len(self._ids) == 1 else np.concatenate(self._ids)
        versions = np.concatenate(self._versions)
        lacking = rows - self.rows
        if lacking > 0:
            ids = np.concatenate([ids, np.full((lacking, *ids.shape[1:]), NOT_RECORDED, np.int32)])
            versions = np.concatenate([versions, np.full(lacking, -1, np.int64)])
        ids, versions = ids[:rows], versions[:rows]
        return Merged(ids, np.any(ids.reshape(len(ids), -1) >= 0, axis=1), versions)


def _of_recorded(ids_RLK: NDArray[np.int32], versions_R: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.where((ids_RLK >= 0).any(axis=(1, 2)), versions_R, -1)
