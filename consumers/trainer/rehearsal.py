"""Step plans of random rollouts, without fleet, verifier and processors: for measuring and testing a trainer alone.

Everything follows from the spec and the step number, so another process can write the same records again.
Legend: B sequences of a step, T tokens of one sequence, L layers, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import blake3
import msgspec
import numpy as np
from numpy.typing import NDArray

from rollwire.consumers.trainer.traces import TOPIC as TRACES
from rollwire.kernels.policy.config import PolicyConfig
from rollwire.kernels.routing.codec import encode_routes
from rollwire.schemas.catalogue import TOPICS as CATALOGUE
from rollwire.schemas.ids import new_group_id, rollout_id
from rollwire.schemas.records import Cut, Microbatch, PackedBatch, Position, RoutingTrace
from rollwire.streams.emit import decode_record, outgoing
from rollwire.streams.seams.log import Log
from rollwire.streams.seams.log_memory import MemoryLog
from rollwire.streams.seams.scan import scan
from rollwire.streams.seams.store import ObjectStore
from rollwire.streams.seams.store_memory import MemoryStore

_EPOCH_US = 1_767_225_600_000_000  # 2026-01-01T00:00:00Z
_PROMPT = 4
TOPICS: Final = {
    name: CATALOGUE[name].partitions
    for name in (TRACES, "packed-batches", "train-steps", "weight-versions", "notices")
}
TINY: Final = PolicyConfig(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=4,
    moe_intermediate_size=16,
)  # fmt: skip
"""A policy that a step takes milliseconds of."""


class Rehearsal(NamedTuple):
    policy_config: PolicyConfig
    lineage: str
    model: str = "policy"
    ranks: int = 1
    sequences: int = 16  # a step, in groups of 4
    microbatches: int = 2  # a step, over all ranks
    lag: int = 1  # of half the sequences, where there are older versions
    seed: int = 0


class Rolled(NamedTuple):
    rollout_id: str
    tokens_T: NDArray[np.uint32]
    logprobs: NDArray[np.float32]  # of the tokens after the prompt
    advantage: float
    trace: RoutingTrace


def sequences(spec: Rehearsal, step: int) -> list[Rolled]:
    rng = np.random.default_rng([spec.seed, step])
    config = spec.policy_config
    made: list[Rolled] = []
    for index in range(spec.sequences):
        group_id = new_group_id(_EPOCH_US + step * 1_000_000, step << 20 | index // 4)
        name = rollout_id(group_id, index % 4)
        length = int(rng.integers(_PROMPT + 2, _PROMPT + 12))
        shape = (length - 1, config.num_hidden_layers, config.num_experts)
        routes = rng.random(shape).argsort(axis=2)[:, :, : config.num_experts_per_tok].astype("u1")
        packed = encode_routes(routes, config.num_experts)
        trace = RoutingTrace(
            rollout_id=name,
            group_id=group_id,
            layers=tuple(range(config.num_hidden_layers)),
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            start_row=0,
            rows=length - 1,
            tokens=length,
            last_row="missing",  # the last sampled token was never an input
            encoding=packed.encoding,
            data=packed.data,
            claim=None,
            recorded_us=_EPOCH_US,
        )
        made.append(
            Rolled(
                name,
                rng.integers(2, config.vocab_size, length).astype("<u4"),
                (-rng.random(length - _PROMPT) * 3 - 0.5).astype("<f4"),
                float(rng.choice([-0.5, 0.5])),
                trace,
            )
        )
    return made


def plan(
    spec: Rehearsal, step: int, traces: Sequence[Position], *, newest_revert: int | None = None
) -> list[PackedBatch]:
    """The slices of all ranks. `traces[i]` is where the trace of sequence i stands."""
    base = step - 1
    made = sequences(spec, step)
    versions = [max(0, base - spec.lag) if index % 2 else base for index in range(len(made))]
    per_micro = -(-len(made) // spec.microbatches)
    micros = [
        _microbatch(made[at : at + per_micro], versions[at : at + per_micro], traces[at : at + per_micro])
        for at in range(0, len(made), per_micro)
    ]
    per_rank = -(-len(micros) // spec.ranks)
    total_tokens = sum(one.tokens_T.size for one in made)
    slices = [
        PackedBatch(
            model=spec.model,
            lineage=spec.lineage,
            step=step,
            base_version=base,
            rank=rank,
            ranks=spec.ranks,
            token_budget=total_tokens,
            max_lag_versions=max(spec.lag, 1),
            total_sequences=len(made),
            total_tokens=total_tokens,
            group_ids=tuple(dict.fromkeys(one.trace.group_id for one in made)),
            oldest_version=min(versions),
            reward_mean=0.5,
            microbatches=tuple(micros[rank * per_rank : (rank + 1) * per_rank]),
            plan_digest="",
            cut=Cut(inputs=(), clock_us=_EPOCH_US + step),
            newest_revert=newest_revert,
        )
        for rank in range(spec.ranks)
    ]
    digest = blake3.blake3(b"".join(msgspec.msgpack.encode(one) for one in slices)).hexdigest()
    return [msgspec.structs.replace(one, plan_digest=digest) for one in slices]


def write_plans(log: Log, spec: Rehearsal, steps: range, *, newest_revert: int | None = None) -> None:
    """Writes the routing traces and plans of `steps`."""
    writer = log.writer()
    try:
        partitions = log.partitions(TRACES)
        for step in steps:
            records = [
                outgoing(one.trace, source="rollwire/rehearsal", time_us=_EPOCH_US)._replace(
                    partition=index % partitions
                )
                for index, one in enumerate(sequences(spec, step))
            ]
            writer.write(records)
        stands: dict[str, Position] = {}
        for record in scan(log, (TRACES,)):
            event = decode_record(record)
            if isinstance(event, RoutingTrace):
                stands[event.rollout_id] = Position(
                    topic=record.topic, partition=record.partition, offset=record.offset
                )
        for step in steps:
            traces = [stands[one.rollout_id] for one in sequences(spec, step)]
            slices = plan(spec, step, traces, newest_revert=newest_revert)
            writer.write(
                [outgoing(one, source="rollwire/rehearsal", time_us=_EPOCH_US + step) for one in slices]
            )
    finally:
        writer.close()


def rehearsal_log(spec: Rehearsal, steps: int) -> MemoryLog:
    """A log in memory that holds the plans of steps 1 to `steps`, at the same offsets every time."""
    log = MemoryLog(TOPICS)
    write_plans(log, spec, range(1, steps + 1))
    return log


def connect_rehearsal(spec: Rehearsal, steps: int) -> tuple[Log, ObjectStore]:
    """What the process of another rank opens: its own copy of the same records."""
    return rehearsal_log(spec, steps), MemoryStore()


def _microbatch(made: Sequence[Rolled], versions: Sequence[int], traces: Sequence[Position]) -> Microbatch:
    lengths = [one.tokens_T.size for one in made]
    masks = [np.arange(length) >= _PROMPT for length in lengths]
    sampled = [length - _PROMPT for length in lengths]
    return Microbatch(
        rollout_ids=tuple(one.rollout_id for one in made),
        cu_seqlens=np.cumsum([0, *lengths]).astype("<i4").tobytes(),
        token_ids=np.concatenate([one.tokens_T for one in made]).tobytes(),
        loss_mask=np.concatenate(masks).astype("u1").tobytes(),
        logprobs=np.concatenate([one.logprobs for one in made]).tobytes(),
        versions=np.repeat(np.array(versions, "<i8"), sampled).tobytes(),
        advantages=np.array([one.advantage for one in made], "<f4").tobytes(),
        traces=tuple(traces),
        environments=("rehearsal",) * len(made),
        fleets=tuple(f"fleet-{index % 2}" for index in range(len(made))),
    )
