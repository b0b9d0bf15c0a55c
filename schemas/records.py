"""The events, as frozen records. One class per topic; `rollwire.schemas.codec` is the only way to bytes and back.

Conventions
    *_us        microseconds since the Unix epoch, UTC
    *_ms        milliseconds, a duration
    bytes       a little-endian array; its dtype is declared beside it or stated in the comment
    [start, end) half-open ranges
    B sequences, T tokens laid end to end, S sampled tokens laid end to end, L layers, K experts a token
The Avro schemas in `schemas/avro/` have the same fields in the same order and carry the full documentation.
"""

from __future__ import annotations

from typing import Literal

from rollwire.schemas.records_base import Event
from rollwire.schemas.records_people import Coverage, Erasure, Feedback, IdSource, Seal

# What comes from elsewhere and is to be had here; what is defined here is so anyway.
__all__ = ["Coverage", "Erasure", "Event", "Feedback", "IdSource", "Seal"]

FinishReason = Literal["stop", "length", "abort", "unknown"]
SegmentKind = Literal["prompt", "sampled", "tool", "summary", "unknown"]
RewardSource = Literal["verifier", "judge", "user", "unknown"]
Fate = Literal["kept", "filtered", "dropped", "unknown"]
VersionKind = Literal["anchor", "delta", "empty", "revert", "unknown"]
LinkKind = Literal["skip", "inverse", "gone", "unknown"]
FleetState = Literal["staged", "swapped", "refused", "stopped", "unknown"]
Severity = Literal["info", "warning", "alarm", "unknown"]
LastRow = Literal["recorded", "missing", "unknown"]


class Span(Event, frozen=True, kw_only=True, gc=False):
    """Which policy version sampled which tokens: half-open over the rollout's *sampled* tokens (vLLM's and SGLang's shape)."""

    version: int
    start: int
    end: int


class Segment(Event, frozen=True, kw_only=True, gc=False):
    """What a stretch of tokens is: half-open over *all* tokens of the rollout; segments tile them."""

    kind: SegmentKind
    start: int
    end: int


class Position(Event, frozen=True, kw_only=True, gc=False):
    """One record of the log. `topic` is without the prefix."""

    topic: str
    partition: int
    offset: int


class OffsetRange(Event, frozen=True, kw_only=True, gc=False):
    """Records [start, end) of one partition. `topic` is without the prefix."""

    topic: str
    partition: int
    start: int
    end: int


class Cut(Event, frozen=True, kw_only=True, gc=False):
    """What a decision saw: the *next* offset of every input it had read, and its clock."""

    inputs: tuple[Position, ...]
    clock_us: int


class Claim(Event, frozen=True, kw_only=True, gc=False):
    """A payload that lives in the object store."""

    key: str
    size: int  # bytes
    sha256: str  # hex


class SharedRun(Event, frozen=True, kw_only=True, gc=False):
    """Tokens that another member of the group holds as well: half-open over *all* tokens of the rollout."""

    rollout_id: str  # the member they come from; of lower index
    from_start: int  # where they start among its tokens
    start: int
    end: int


class Rollout(Event, frozen=True, kw_only=True, gc=False):
    """`rollouts`: one sampled trajectory."""

    rollout_id: str  # "<group_id>.<index>"
    group_id: str  # UUIDv7: carries its opening time
    index: int  # 0 <= index < group_size
    group_size: int
    model: str
    lineage: str  # UUID of the training run that published the versions in `spans`
    environment: str  # "countdown"
    task_id: str  # names the problem; equal problems have equal ids
    task: str  # the problem as JSON: what the verifier needs to score the rollout
    token_ids: bytes  # [T] of `token_dtype`
    token_dtype: str  # "u1" | "u2" | "u4"
    segments: tuple[Segment, ...]  # tile [0, T)
    loss_mask: bytes  # [T] u1: 1 where the token is trained on; never outside "sampled" segments
    logprobs: bytes  # [S] f4: log mu(token) at temperature 1 under the version that sampled it; no NaN
    spans: tuple[Span, ...]  # tile [0, S), versions do not fall
    finish_reason: FinishReason
    temperature: float
    top_k_experts: int  # K of the routing trace that belongs to it; 0 = none was recorded
    fleet: str
    replica: str
    seed: int  # of the sampler
    started_us: int
    finished_us: int
    shared: tuple[SharedRun, ...] = ()  # before a fork, or a summary: not trained on here
    sealed: Seal | None = None  # then `token_ids` is ciphertext of u4 tokens, and `task` is empty
    outcome: str = ""  # class of what happened in live traffic: "answered", "tool_error", ...; "" = not said
    tenant: str = ""  # whose traffic it was; "" = not said


class ProductionRollout(Rollout, frozen=True, kw_only=True, gc=False):
    """`production-rollouts`: one answer given in live traffic, the only one of its group, sealed for its person.

    Its fields are a rollout's, in the same order: its value's body stands for that rollout in a group.
    """


class Component(Event, frozen=True, kw_only=True, gc=False):
    name: str
    value: float


class Reward(Event, frozen=True, kw_only=True, gc=False):
    """`rewards`: the reward of one rollout."""

    rollout_id: str
    group_id: str
    reward: float | None  # None = could not be scored; never 0 for that (C09)
    components: tuple[Component, ...]
    outcome: str  # a word for people and tables: "right", "wrong value", "does not parse", ...
    source: RewardSource
    verifier: str
    verifier_version: str
    evidence: tuple[str, ...]  # ids of the events it was derived from, beyond the rollout
    scored_us: int


class RoutingTrace(Event, frozen=True, kw_only=True, gc=False):
    """`routing-traces`: the experts chosen for rows [start_row, start_row + rows) of the rollout's tokens.

    Row t holds the experts used when token t was the *input* of a forward pass, so a rollout whose last sampled
    token was never fed back has T - 1 rows: `last_row` says which, and rows end where it says.
    """

    rollout_id: str
    group_id: str
    layers: tuple[int, ...]  # global indices of the MoE layers, ascending
    num_experts: int
    top_k: int
    start_row: int
    rows: int
    tokens: int  # T of the rollout
    last_row: LastRow  # of token T - 1; "missing" = it was never an input
    encoding: str  # "u1" | "bits" | "bits+zstd": [rows, L, K], see `schemas.routes`
    data: bytes | None  # None = see `claim`
    claim: Claim | None
    recorded_us: int


class Member(Event, frozen=True, kw_only=True, gc=False):
    """One rollout of a group, with what training needs to know of it."""

    rollout: Rollout
    reward: float | None
    advantage: float | None  # None = computed later (production rollouts), or the member is not trained on
    trace: Position | None  # where its routing trace stands
    signals: int = 0  # feedback events that its reward was derived from


class Group(Event, frozen=True, kw_only=True, gc=False):
    """`groups`: a complete, trainable group."""

    group_id: str
    model: str
    lineage: str
    environment: str
    task_id: str
    group_size: int
    baseline: (
        str  # "mean" | "leave_one_out" | "cohort": `pack` takes it over the production rollouts of a step
    )
    members: tuple[Member, ...]  # by index
    cut: Cut


class GroupFate(Event, frozen=True, kw_only=True, gc=False):
    """`group-fates`: what became of a group. Exactly one per group; it gives the producer's slot back."""

    group_id: str
    fate: Fate
    reason: str
    detail: str
    decided_by: str  # "assemble" | "assemble-production" | "pack"
    fleet: str
    replica: str  # whose slot it was
    members: tuple[str, ...]  # rollout ids seen
    reward_mean: float | None  # over the scored members
    group_size: int
    for_version: int | None  # the version the plan would be applied to
    oldest_version: int | None  # of all spans
    cut: Cut
    place: int | None = (
        None  # of a kept group: how many stand before it in its plan; None = not kept, or not said
    )


class GroupClosed(Event, frozen=True, kw_only=True, gc=False):
    """`groups-closed`: changelog of `assemble`. A group that stands here is never opened again."""

    group_id: str
    fate: Fate
    reason: str
    closed_us: int


class ProductionGroupClosed(GroupClosed, frozen=True, kw_only=True, gc=False):
    """`production-groups-closed`: the same of `assemble-production`."""


class Microbatch(Event, frozen=True, kw_only=True, gc=False):
    """Sequences laid end to end, [0, cu_seqlens[-1]) tokens, never more than the budget. Without any, it keeps a rank's
    place in a slot of a lockstep plan."""

    rollout_ids: tuple[str, ...]  # [B]
    cu_seqlens: bytes  # [B + 1] i4
    token_ids: bytes  # [T] u4
    loss_mask: bytes  # [T] u1
    logprobs: bytes  # [S] f4, the masked tokens in order
    versions: bytes  # [S] i8: the version that sampled each masked token
    advantages: bytes  # [B] f4
    traces: tuple[Position | None, ...]  # [B]
    environments: tuple[str, ...] = ()  # [B], or () = not known
    fleets: tuple[str, ...] = ()  # [B] who sampled it, or () = not known
    seals: tuple[Seal | None, ...] = ()  # [B] what opens its tokens, None = they are plain; () = all are


class PackedBatch(Event, frozen=True, kw_only=True, gc=False):
    """`packed-batches`: what one rank does in one optimiser step. Partition = rank."""

    model: str
    lineage: str
    step: int  # 1, 2, 3, ...
    base_version: int  # the version the step is applied to; it publishes base_version + 1
    rank: int
    ranks: int
    token_budget: int
    max_lag_versions: int
    total_sequences: int  # over all ranks: the loss is divided by it
    total_tokens: int  # over all ranks
    group_ids: tuple[str, ...]  # of the whole plan, in the order taken
    oldest_version: int  # over the whole plan
    reward_mean: float  # over the scored members of the whole plan; for `train-steps`, never for the loss
    microbatches: tuple[Microbatch, ...]
    plan_digest: str  # blake3 hex over the plan of all ranks
    cut: Cut
    newest_revert: int | None = (
        None  # the last version that was a revert when it was made; None = there was none
    )
    coverage: tuple[Coverage, ...] = ()  # of the plan's production rollouts, by outcome ascending
    cohort_size: int = 0  # production rollouts of the plan, those that nobody scored included
    cohort_mean: float | None = None  # mean reward over its scored ones; None = there are none
    max_age_ms: int | None = (
        None  # how old one may be at the cut's clock, since its group was opened; None = there are none
    )


class Mismatch(Event, frozen=True, kw_only=True, gc=False):
    """|log pi - log mu| over the trained tokens: pi recomputed by the trainer at base_version, mu as sampled."""

    tokens: int
    mean: float
    p50: float
    p99: float
    max: float
    k1: float  # mean of log mu - log pi: estimates KL(mu || pi), Schulman 2020
    k3: float  # mean of (r - 1) - log r with r = pi / mu: the same, never negative


class MismatchBy(Event, frozen=True, kw_only=True, gc=False):
    """|log pi - log mu| of the trained tokens of one version, environment and fleet."""

    version: int | None  # that sampled the tokens; None = all versions of this environment and fleet
    environment: str  # "" = not known
    fleet: str  # "" = not known
    tokens: int
    p50: float
    p99: float
    max: float


class LagCount(Event, frozen=True, kw_only=True, gc=False):
    lag: int  # base_version - version of the token
    tokens: int


class TrainStep(Event, frozen=True, kw_only=True, gc=False):
    """`train-steps`: one optimiser step that was taken."""

    model: str
    lineage: str
    step: int
    base_version: int
    version: int
    loss: float
    grad_norm: float
    entropy: float  # nats, mean over trained tokens
    learning_rate: float
    reward_mean: float  # of the groups in the plan
    sequences: int
    tokens: int  # all tokens of the microbatches
    trained_tokens: int
    groups: int
    max_lag: int  # versions, of the oldest span in the plan
    lag_histogram: tuple[LagCount, ...]  # per trained token
    mismatch: Mismatch  # with routing replay as configured
    mismatch_same_version: Mismatch | None  # the tokens of lag 0 alone; None = there were none
    mismatch_no_replay: Mismatch | None  # the same tokens, router free; None = not measured at this step
    routes_differing: (
        float | None
    )  # share of (token, layer) whose set of experts differs; None = not measured
    ratio_truncated: float  # share of trained tokens whose ratio hit its bound
    tokens_per_s: float
    duration_ms: float
    consumed: tuple[OffsetRange, ...]  # of packed-batches, one per rank
    plan_digest: str
    state_digest: str  # of the published weights
    settings: dict[str, str]  # threads, ranks, seeds, switches: what the bits depend on
    finished_us: int
    mismatch_by: tuple[MismatchBy, ...] = ()  # by environment, fleet; there the total first, then by version
    masked_low: int = (
        0  # trained tokens that the loss left out, since their ratio lay below the mask's bounds
    )
    masked_high: int = 0  # above them
    rejected_sequences: int = 0  # sequences that the loss left out whole
    rejected_tokens: int = 0  # their trained tokens
    routes_implausible: tuple[int, ...] = ()  # [L] recorded experts the filter found implausible; empty = off
    coverage: tuple[Coverage, ...] = ()  # of the plan's production rollouts
    production_sequences: int = 0  # sequences of production rollouts, the erased ones included
    erased_sequences: int = 0  # of them, those left out since their person's key is destroyed


class LinkObject(Event, frozen=True, kw_only=True, gc=False):
    """One shard of a delta."""

    key: str
    size: int  # bytes
    sha256: str  # hex
    head_bytes: int  # of header and table, which a reader of a slice fetches first


class WeightVersion(Event, frozen=True, kw_only=True, gc=False):
    """`weight-versions`: a version that can be read. Its manifest and all shards stood in the store before this event."""

    model: str
    lineage: str
    version: int
    kind: VersionKind
    base_version: int | None  # None = an anchor that needs no other version
    step: int  # 0 = before training
    manifest: Claim
    anchor: Claim | None  # the manifest of a full snapshot of the same version, when there is one
    checkpoint: Claim | None  # the trainer's state at this version, when there is one
    state_digest: str  # incremental digest of the state, hex (rollwire.kernels.digest)
    full_bytes: int  # size of the state
    stored_bytes: int  # size of what this version added to the store, without anchor and checkpoint
    changed_elements: int
    total_elements: int
    published_us: int
    coder: str = ""  # "gap" (its delta runs backwards as well) | "context" | "" = no delta, or not said
    objects: tuple[
        LinkObject, ...
    ] = ()  # the delta's shards; none = nothing changed, or only the manifest has them
    reverts_to: int | None = None  # of a revert: the older version whose weights it has; None = no revert


class WeightLink(Event, frozen=True, kw_only=True, gc=False):
    """`weight-links`: one more way between two published versions; its objects stood in the store before this event.

    A link of kind `gone` says that every way from `base_version` to `version` written before it is deleted.
    """

    model: str
    lineage: str
    version: int  # what it gives
    base_version: int | None  # what it applies to; None only in `gone`: the full snapshot of `version`
    kind: LinkKind
    coder: str  # "gap" | "context"; "" in `gone`
    base_digest: str  # incremental digests, hex; "" in `gone`
    state_digest: str
    objects: tuple[LinkObject, ...]  # none where the two states are equal, and in `gone`
    stored_bytes: int
    published_us: int


class FleetStatus(Event, frozen=True, kw_only=True, gc=False):
    """`fleet-status`: what a replica serves. Key = replica."""

    fleet: str
    replica: str
    state: FleetState
    version: int  # what it serves now; -1 = nothing yet
    wanted_version: int
    state_digest: str  # of what it serves now
    stage_ms: float
    pause_ms: float  # how long sampling stood still
    reason: str
    open_rollouts: int
    at_us: int
    fetched_bytes: int = 0  # read from the store to stage the wanted version
    target: str = ""  # what holds the weights: "numpy", "torch", "folder", ...; "" = the process that samples
    channel: str = ""  # promotion channel that chose the wanted version; "" = none did


class Score(Event, frozen=True, kw_only=True, gc=False):
    name: str
    value: float


class Promotion(Event, frozen=True, kw_only=True, gc=False):
    """A version is what a channel's followers serve from now on. The last one in the log counts."""

    channel: str  # "<fleet>/<replica>" is a replica's own, which comes before whatever else it follows
    by: str
    reason: str


class Evaluation(Event, frozen=True, kw_only=True, gc=False):
    """`evaluations`: scores of one served version on one suite, or the promotion of a version onto a channel."""

    model: str
    lineage: str
    suite: str  # "" in a promotion
    version: int  # -1 in a promotion = the channel names none any more
    scores: tuple[Score, ...]  # () in a promotion
    tasks: int
    samples_per_task: int
    replica: str  # who measured, or wrote the promotion
    at_us: int
    promotion: Promotion | None = None


class Notice(Event, frozen=True, kw_only=True, gc=False):
    """`notices`: alarms, settings, stops."""

    model: str
    name: str  # "settings", "shutdown", "drift", ...
    severity: Severity
    text: str
    attributes: dict[str, str]
    at_us: int


class Header(Event, frozen=True, kw_only=True, gc=False):
    key: str
    value: bytes | None


class DeadLetter(Event, frozen=True, kw_only=True, gc=False):
    """`dead-letters`: an event that was refused, whole. Key = source topic."""

    source: Position
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]
    source_timestamp_us: int
    reason: str
    detail: str
    refused_by: str
    refused_us: int
