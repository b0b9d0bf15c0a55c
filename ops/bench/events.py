"""`rollwire bench events`: events to bytes and back, on one core, against two bare baselines in the same run.

Baselines hold the same content and check nothing: `json` (the standard library, arrays as lists of numbers) and bare
`fastavro` (the same schema, dict to bytes and back; no headers, no types, no meaning checked). The codec's own figures
include all checks and the CloudEvents headers. Events have the demo's sizes: 30 tokens, 10 of them sampled; groups of
8; a plan of 64 groups in microbatches of 4,096 tokens.

Figures, for each event (rollout, routing_trace, group, packed_batch):

    bench.events.<event>.encode_per_s               events a second of CPU time; baseline: json
    bench.events.<event>.decode_per_s               the same
    bench.events.<event>.encode_vs_fastavro_per_s   the same value, baseline: bare fastavro
    bench.events.<event>.decode_vs_fastavro_per_s   the same
    bench.events.<event>.value_bytes                size of the value; baseline: the JSON text
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
import numpy as np
from fastavro import schemaless_reader, schemaless_writer

from rollwire.ops.figures import Figure
from rollwire.ops.readable import readable_event
from rollwire.schemas import records as r
from rollwire.schemas.codec import decode, encode, schema_for
from rollwire.schemas.framing import PREFIX_BYTES
from rollwire.schemas.ids import new_group_id, rollout_id

_US: Final = 1_767_225_600_000_000
_LINEAGE: Final = "0f8fad5b-d9cb-469f-a165-70867728950e"
PROMPT, SAMPLED, MEMBERS, GROUPS, BUDGET = 20, 10, 8, 64, 4096
LAYERS, EXPERTS, TOP_K = 3, 8, 2
TOKENS: Final = PROMPT + SAMPLED


def _rollout(rng: np.random.Generator, group: str, index: int) -> r.Rollout:
    swap = int(rng.integers(1, SAMPLED))
    return r.Rollout(
        rollout_id=rollout_id(group, index),
        group_id=group,
        index=index,
        group_size=MEMBERS,
        model="policy",
        lineage=_LINEAGE,
        environment="countdown",
        task_id="3f2a9c0e51d7b684",
        task='{"numbers":[3,5,7,11],"target":22}',
        token_ids=rng.integers(0, 20, TOKENS, dtype=np.uint8).tobytes(),
        token_dtype="u1",
        segments=(
            r.Segment(kind="prompt", start=0, end=PROMPT),
            r.Segment(kind="sampled", start=PROMPT, end=TOKENS),
        ),
        loss_mask=bytes(PROMPT) + b"\x01" * SAMPLED,
        logprobs=(-rng.random(SAMPLED, dtype=np.float32)).astype("<f4").tobytes(),
        spans=(r.Span(version=41, start=0, end=swap), r.Span(version=42, start=swap, end=SAMPLED)),
        finish_reason="stop",
        temperature=1.0,
        top_k_experts=TOP_K,
        fleet="fleet",
        replica="fleet-0",
        seed=int(rng.integers(0, 2**62)),
        started_us=_US,
        finished_us=_US + 100_000,
    )


def _trace(rng: np.random.Generator, rollout: r.Rollout) -> r.RoutingTrace:
    first = rng.integers(0, EXPERTS, ((TOKENS - 1) * LAYERS, 1))
    routes = (first + np.arange(TOP_K)) % EXPERTS
    return r.RoutingTrace(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        layers=tuple(range(LAYERS)),
        num_experts=EXPERTS,
        top_k=TOP_K,
        start_row=0,
        rows=TOKENS - 1,
        tokens=TOKENS,
        last_row="missing",
        encoding="u1",
        data=routes.astype(np.uint8).tobytes(),
        claim=None,
        recorded_us=_US,
    )


def _group(rng: np.random.Generator, number: int) -> r.Group:
    group = new_group_id(_US + number * 1_000, int(rng.integers(0, 2**62)))
    members = tuple(
        r.Member(
            rollout=_rollout(rng, group, index),
            reward=float(index % 2),
            advantage=index % 2 - 0.5,
            trace=r.Position(topic="routing-traces", partition=1, offset=1_000_000 + index),
        )
        for index in range(MEMBERS)
    )
    return r.Group(
        group_id=group,
        model="policy",
        lineage=_LINEAGE,
        environment="countdown",
        task_id="3f2a9c0e51d7b684",
        group_size=MEMBERS,
        baseline="mean",
        members=members,
        cut=r.Cut(inputs=(r.Position(topic="rollouts", partition=1, offset=1_000_000),), clock_us=_US),
    )


def _microbatch(members: list[r.Member]) -> r.Microbatch:
    rollouts = [member.rollout for member in members]
    versions = [span.version for x in rollouts for span in x.spans for _ in range(span.start, span.end)]
    tokens = np.frombuffer(b"".join(x.token_ids for x in rollouts), np.uint8)
    return r.Microbatch(
        rollout_ids=tuple(x.rollout_id for x in rollouts),
        cu_seqlens=np.arange(0, TOKENS * len(rollouts) + 1, TOKENS, dtype="<i4").tobytes(),
        token_ids=tokens.astype("<u4").tobytes(),
        loss_mask=b"".join(x.loss_mask for x in rollouts),
        logprobs=b"".join(x.logprobs for x in rollouts),
        versions=np.array(versions, "<i8").tobytes(),
        advantages=np.array([member.advantage for member in members], "<f4").tobytes(),
        traces=tuple(member.trace for member in members),
    )


def _plan(groups: list[r.Group]) -> r.PackedBatch:
    members = [member for group in groups for member in group.members]
    each = BUDGET // TOKENS
    return r.PackedBatch(
        model="policy",
        lineage=_LINEAGE,
        step=43,
        base_version=42,
        rank=0,
        ranks=1,
        token_budget=BUDGET,
        max_lag_versions=3,
        total_sequences=len(members),
        total_tokens=len(members) * TOKENS,
        group_ids=tuple(group.group_id for group in groups),
        oldest_version=41,
        reward_mean=0.5,
        microbatches=tuple(_microbatch(members[at : at + each]) for at in range(0, len(members), each)),
        plan_digest="0" * 64,
        cut=r.Cut(inputs=(r.Position(topic="groups", partition=1, offset=1_000_000),), clock_us=_US),
    )


def sample_events(seed: int) -> dict[str, r.Event]:
    """One event of each measured kind, with the demo's sizes."""
    rng = np.random.default_rng(seed)
    groups = [_group(rng, number) for number in range(GROUPS)]
    rollout = groups[0].members[0].rollout
    return {
        "rollout": rollout,
        "routing_trace": _trace(rng, rollout),
        "group": groups[0],
        "packed_batch": _plan(groups),
    }


def _per_s(work: Callable[[], object], repeats: int, slice_s: float) -> float:
    """Calls a second of this process's CPU time: the best of `repeats` slices of about `slice_s`."""
    work()
    calls, best = 1, 0.0
    while True:
        began = time.process_time()
        for _ in range(calls):
            work()
        took = time.process_time() - began
        if took >= slice_s:
            best = max(best, calls / took)
            repeats -= 1
            if repeats <= 0:
                return best
        else:
            calls = max(calls + 1, round(calls * min(10.0, 1.1 * slice_s / max(took, 1e-6))))


def _measure(name: str, event: r.Event, repeats: int, slice_s: float) -> Iterator[Figure]:
    schema = schema_for(type(event))
    encoded = encode(event, source="rollwire/bench", time_us=_US)
    plain = msgspec.to_builtins(event, builtin_types=(bytes,))
    content: Any = readable_event(event)
    text = json.dumps(content, separators=(",", ":"))

    def bare_encode() -> bytes:
        out = io.BytesIO()
        schemaless_writer(out, schema.avro, plain)
        return out.getvalue()

    body = bare_encode()
    if encoded.value[PREFIX_BYTES:] != body or decode(encoded.topic, encoded.value, encoded.headers) != event:
        raise ValueError(f"the codec and bare fastavro disagree about {name}")

    def rate(work: Callable[[], object]) -> float:
        return _per_s(work, repeats, slice_s)

    ours_encode = rate(lambda: encode(event, source="rollwire/bench", time_us=_US))
    ours_decode = rate(lambda: decode(encoded.topic, encoded.value, encoded.headers, encoded.key))
    json_encode = rate(lambda: json.dumps(content, separators=(",", ":")))
    json_decode = rate(lambda: json.loads(text))
    avro_encode = rate(bare_encode)
    avro_decode = rate(lambda: schemaless_reader(io.BytesIO(body), schema.avro, None))
    for figure, value, baseline in (
        ("encode_per_s", ours_encode, json_encode),
        ("decode_per_s", ours_decode, json_decode),
        ("encode_vs_fastavro_per_s", ours_encode, avro_encode),
        ("decode_vs_fastavro_per_s", ours_decode, avro_decode),
    ):
        yield Figure(name=f"bench.events.{name}.{figure}", value=value, unit="1/s", baseline=baseline)
    yield Figure(
        name=f"bench.events.{name}.value_bytes",
        value=float(len(encoded.value)),
        unit="B",
        baseline=float(len(text.encode())),
    )


def bench_events(*, repeats: int = 5, seed: int = 0, slice_s: float = 0.1) -> list[Figure]:
    """All figures. Each rate is the best of `repeats` slices of `slice_s` seconds of CPU time."""
    return [
        figure
        for name, event in sample_events(seed).items()
        for figure in _measure(name, event, repeats, slice_s)
    ]
