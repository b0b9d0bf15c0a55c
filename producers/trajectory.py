"""From what an engine returns to the events `rollouts` and `routing-traces`. Pure.

P prompt tokens, N sampled tokens of one turn, T all tokens, S all sampled tokens, R rows of a trace, L layers, K experts a token
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwire.kernels.routing.codec import Packed, encode_routes
from rollwire.kernels.routing.merge import RouteMerge
from rollwire.schemas.errors import ConfigError
from rollwire.schemas.ids import rollout_id
from rollwire.schemas.records import (
    FinishReason,
    Rollout,
    RoutingTrace,
    Segment,
    SegmentKind,
    SharedRun,
    Span,
)
from rollwire.streams.seams.engine import Sampled
from rollwire.streams.seams.environment import Task

_FINISH_REASONS: Final[dict[str, FinishReason]] = {"stop": "stop", "length": "length", "abort": "abort"}


class Origin(NamedTuple):
    """What all rollouts of one process share."""

    model: str
    lineage: str
    environment: str
    fleet: str
    replica: str
    token_dtype: str  # "u1" | "u2" | "u4"
    temperature: float
    num_experts: int  # of a MoE layer; only told by a trace
    moe_layers: tuple[int, ...] | None  # global indices; None = all layers are MoE layers
    pack_routes: bool = True  # write expert ids in as few bits as they need; False = one byte an id


class Finished(NamedTuple):
    rollout: Rollout | None  # None = ended before the first token of its own: there is nothing to hand back
    trace: RoutingTrace | None


def narrowest_dtype(vocab_size: int) -> str:
    """The narrowest dtype that holds every token id."""
    if vocab_size <= 1 << 8:
        return "u1"
    return "u2" if vocab_size <= 1 << 16 else "u4"


def spans_of(versions_S: NDArray[np.int64]) -> tuple[Span, ...]:
    """Runs of equal versions, half-open, in order (C02)."""
    if versions_S.size == 0:
        return ()
    starts = [0, *(np.flatnonzero(np.diff(versions_S)) + 1).tolist()]
    ends = [*starts[1:], versions_S.size]
    return tuple(
        Span(version=int(versions_S[start]), start=start, end=end)
        for start, end in zip(starts, ends, strict=True)
    )


def _finish_reason(reason: str) -> FinishReason:
    if reason not in _FINISH_REASONS:
        raise ConfigError(
            f"an engine ended a request with {reason!r}; known are {', '.join(_FINISH_REASONS)}"
        )
    return _FINISH_REASONS[reason]


class Trajectory:
    """One rollout being made: prompt, sampled stretches and what tools said between them."""

    def __init__(
        self, group_id: str, index: int, group_size: int, task: Task, seed: int, started_us: int
    ) -> None:
        self.rollout_id = rollout_id(group_id, index)
        self.group_id = group_id
        self.index = index
        self.task = task
        self.seed = seed
        self._group_size = group_size
        self._started_us = started_us
        self._tokens: list[NDArray[np.int64]] = []
        self._segments: list[Segment] = []
        self._logprobs: list[NDArray[np.float32]] = []
        self._versions: list[NDArray[np.int64]] = []
        self._shared: list[SharedRun] = []
        self._routes = RouteMerge()
        self._length = 0
        self._add("prompt", task.prompt_ids)

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """[T] all tokens so far: the prompt of the next turn."""
        return np.concatenate(self._tokens)

    @property
    def sampled_count(self) -> int:
        return sum(part.size for part in self._logprobs)

    @property
    def tokens_used(self) -> int:
        """All tokens behind the prompt."""
        return self._length - self.task.prompt_ids.size

    @property
    def sampled_ids(self) -> NDArray[np.int64]:
        """[S]"""
        parts = [t for t, s in zip(self._tokens, self._segments, strict=True) if s.kind == "sampled"]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def add_sampled(self, sampled: Sampled) -> None:
        """One turn. Raises `ConfigError` where the engine's arrays do not fit one another: nothing is padded or cut
        (C01, C17)."""
        count = sampled.token_ids.size
        if sampled.logprobs.size != count or sampled.versions.size != count:
            raise ConfigError(
                f"request {sampled.request_id}: {count} tokens, {sampled.logprobs.size} logprobs, {sampled.versions.size} versions"
            )
        if count == 0:
            return
        if sampled.routes is not None:
            self._add_routes(sampled, sampled.routes)
        self._add("sampled", sampled.token_ids)
        self._logprobs.append(sampled.logprobs)
        self._versions.append(sampled.versions)

    def add_tool(self, tool_ids: NDArray[np.int64]) -> None:
        if tool_ids.size:
            self._add("tool", tool_ids)

    def branch(self, index: int, at: int, seed: int, started_us: int) -> Trajectory:
        """Another rollout of the group, which goes on from the first `at` tokens of this one. It holds them with their
        logprobs, spans and routes, and leaves them to this one to be trained on.

        Raises `ConfigError` where `at` is not behind the prompt or not within the tokens, or `index` not a later one.
        """
        prompt = self.task.prompt_ids.size
        if not prompt < at <= self._length:
            raise ConfigError(
                f"{self.rollout_id}: no fork at token {at} of {self._length}, {prompt} of them prompt"
            )
        other = self._later(index, seed, started_us)
        stretch = 0
        for segment, ids in zip(self._segments[1:], self._tokens[1:], strict=True):
            taken = min(segment.end, at) - segment.start
            if taken <= 0:
                break
            other._add(segment.kind, ids[:taken])
            if segment.kind == "sampled":
                other._logprobs.append(self._logprobs[stretch][:taken])
                other._versions.append(self._versions[stretch][:taken])
                stretch += 1
        other._share(self, prompt, prompt, at)
        rows = min(self._routes.rows, at)
        if rows:
            merged = self._routes.merged(rows)
            if rows >= at - 1:
                other._routes.add(
                    merged.ids_NLK, start_row=0, tokens=at, last_row=rows == at, versions=merged.versions_N
                )
        return other

    def summarised(self, index: int, start: int, end: int, seed: int, started_us: int) -> Trajectory:
        """Another rollout of the group, whose context is the prompt and this one's sampled tokens [start, end): a summary
        of it. They are context there; this one trains on them.

        Raises `ConfigError` where the tokens do not lie within one sampled stretch, or `index` is not a later one.
        """
        for segment, ids in zip(self._segments, self._tokens, strict=True):
            if segment.kind == "sampled" and segment.start <= start < end <= segment.end:
                other = self._later(index, seed, started_us)
                other._add("summary", ids[start - segment.start : end - segment.start])
                other._share(self, start, self.task.prompt_ids.size, other._length)
                return other
        raise ConfigError(f"{self.rollout_id}: tokens [{start}, {end}) are not of one sampled stretch")

    def finish(self, origin: Origin, finish_reason: str, finished_us: int) -> Finished:
        """The events of the whole trajectory."""
        if not self._own_sampled:
            return Finished(None, None)
        if self._segments[-1].kind == "tool":  # aborted before anything was sampled on it
            self._length = self._segments.pop().start
            self._tokens.pop()
        trace = self._trace(origin, finished_us)
        mask_T = np.zeros(self._length, dtype=np.uint8)
        for segment in self._segments:
            if segment.kind == "sampled":
                mask_T[segment.start : segment.end] = 1
        for run in self._shared:
            mask_T[run.start : run.end] = 0
        rollout = Rollout(
            rollout_id=self.rollout_id,
            group_id=self.group_id,
            index=self.index,
            group_size=self._group_size,
            model=origin.model,
            lineage=origin.lineage,
            environment=origin.environment,
            task_id=self.task.task_id,
            task=self.task.task,
            token_ids=self.token_ids.astype(f"<{origin.token_dtype}").tobytes(),
            token_dtype=origin.token_dtype,
            segments=tuple(self._segments),
            loss_mask=mask_T.tobytes(),
            logprobs=np.concatenate(self._logprobs).astype("<f4").tobytes(),
            spans=spans_of(np.concatenate(self._versions)),
            finish_reason=_finish_reason(finish_reason),
            temperature=origin.temperature,
            top_k_experts=0 if trace is None else trace.top_k,
            fleet=origin.fleet,
            replica=origin.replica,
            seed=self.seed,
            started_us=self._started_us,
            finished_us=finished_us,
            shared=tuple(self._shared),
        )
        return Finished(rollout, trace)

    def _add(self, kind: SegmentKind, ids: NDArray[np.int64]) -> None:
        self._segments.append(Segment(kind=kind, start=self._length, end=self._length + ids.size))
        self._tokens.append(ids)
        self._length += ids.size

    @property
    def _own_sampled(self) -> bool:
        """Whether anything was sampled here, beyond what is shared."""
        ends = [run.end for run in self._shared]
        return any(s.kind == "sampled" and s.end > max(ends, default=0) for s in self._segments)

    def _later(self, index: int, seed: int, started_us: int) -> Trajectory:
        if not self.index < index < self._group_size:
            raise ConfigError(f"{self.rollout_id}: index {index} is not a later one of {self._group_size}")
        return Trajectory(self.group_id, index, self._group_size, self.task, seed, started_us)

    def _share(self, origin: Trajectory, from_start: int, start: int, end: int) -> None:
        run = SharedRun(rollout_id=origin.rollout_id, from_start=from_start, start=start, end=end)
        self._shared.append(run)

    def _add_routes(self, sampled: Sampled, routes_RLK: NDArray[np.integer[Any]]) -> None:
        tokens = self._length + sampled.token_ids.size
        # The row of a token's input was computed with the weights that sampled the token behind it.
        versions_R = sampled.versions
        if sampled.routes_of_last:
            versions_R = np.append(versions_R, versions_R[-1])
        lead = len(routes_RLK) - versions_R.size
        if lead > 0:
            versions_R = np.concatenate([np.full(lead, versions_R[0]), versions_R])
        try:
            self._routes.add(
                routes_RLK,
                start_row=sampled.routes_start,
                tokens=tokens,
                last_row=sampled.routes_of_last,
                versions=versions_R[-len(routes_RLK) :] if len(routes_RLK) else versions_R[:0],
            )
        except ConfigError as error:
            raise ConfigError(f"request {sampled.request_id}: {error}") from error

    def _trace(self, origin: Origin, recorded_us: int) -> RoutingTrace | None:
        """None where no row was recorded, or where one that is missing cannot be told: a byte an id has no word for it."""
        if self._routes.empty:
            return None
        last_row = self._routes.rows >= self._length
        merged = self._routes.merged(self._length if last_row else self._length - 1)
        routes_RLK = merged.ids_NLK
        if not (merged.recorded_N.any() if origin.pack_routes else (routes_RLK >= 0).all()):
            return None
        layers: Sequence[int] = range(routes_RLK.shape[1]) if origin.moe_layers is None else origin.moe_layers
        if len(layers) != routes_RLK.shape[1]:
            raise ConfigError(f"routes of {routes_RLK.shape[1]} layers, but moe_layers names {len(layers)}")
        packed = (
            encode_routes(routes_RLK, origin.num_experts)
            if origin.pack_routes
            else Packed("u1", routes_RLK.astype(np.uint8).tobytes())
        )
        return RoutingTrace(
            rollout_id=self.rollout_id,
            group_id=self.group_id,
            layers=tuple(layers),
            num_experts=origin.num_experts,
            top_k=routes_RLK.shape[2],
            start_row=0,
            rows=routes_RLK.shape[0],
            tokens=self._length,
            last_row="recorded" if last_row else "missing",
            encoding=packed.encoding,
            data=packed.data,
            claim=None,
            recorded_us=recorded_us,
        )
