"""What a person does about a refusal, one sentence a reason code: `rollwire dlq show` and the documentation say it.

Replaying helps where something *around* the event was wrong and has been put right; an event that contradicts itself is
refused again, whoever reads it.
"""

from __future__ import annotations

from typing import Final

ADVICE: Final[dict[str, str]] = {
    "tombstone_not_allowed": "Drop it, and find who deletes on a topic that keeps everything; replaying refuses it again.",
    "too_large": "Drop it, and have its writer put large payloads into the object store (a claim check).",
    "not_framed": "Drop it, and find who writes to the topic without the codec; `show` prints its first bytes.",
    "unknown_schema": "Upgrade the readers to the release that has the schema, or register it, then replay.",
    "wrong_schema": "Drop it, and have its writer send the event to its own topic.",
    "malformed": "Drop it, and compare its writer's schema with the released one (`rollwire schemas`).",
    "trailing_bytes": "Drop it, and look for a writer that appends or joins values.",
    "limit_exceeded": "Drop it if it is foreign; an event of ours above the limits is to be split by its writer.",
    "header_mismatch": "Drop it, and have its writer send the CloudEvents headers that the value demands.",
    "key_mismatch": "Drop it, and have its writer use the key that the event demands; nothing else is joined.",
    "not_finite": "Drop it, and mend what computes the number; null says that there is none.",
    "time_invalid": "Put the writer's clock or unit right. Of a clock that ran ahead: replay once that time has come.",
    "inconsistent": "Drop it, and mend its writer: the detail names the fields that contradict one another.",
    "logprob_length": "Drop it: logprobs are never padded or cut. Mend the sampler's adapter.",
    "logprob_missing": "Drop it: a logprob is never invented. Have the engine return one for each sampled token.",
    "span_invalid": "Drop it, and have the fleet report spans that tile the sampled tokens.",
    "segment_invalid": "Drop it, and have the rollout worker tile the tokens with segments.",
    "array_length": "Drop it, and mend the writer's dtype or count.",
    "id_invalid": "Drop it, and have its writer build ids as `<UUIDv7>.<index>`.",
    "sequence_empty": "Drop it: there is nothing to train on.",
    "version_future": "Look for a fleet that serves weights nobody published. Its group has its fate: it is not replayed.",
    "lineage_abandoned": "After a revert: nothing, fleets follow. Else point the fleet to the trained lineage. Its group has its fate: no replay.",
    "sharing_invalid": "Drop it, and mend how the worker marks shared tokens.",
    "seal_invalid": "Drop it, and have its writer seal the tokens of live traffic with the person's data key.",
    "reward_invalid": "Mend the verifier, score the rollout anew, and drop this one.",
    "unknown_signal": "Add the signal to the rules, then replay within the horizon; or have its writer use a name that they have.",
    "value_missing": "Drop it, and have its writer send a value, or a label of the signal.",
    "value_out_of_range": "Drop it, and mend its writer, or widen the range in a new version of the rules.",
    "label_unknown": "Add the label to the rules, then replay within the horizon; or have its writer use one that they have.",
    "unknown_rollout": "If the rollout came later, replay it; else look for answers that are served without a rollout event.",
    "tenant_mismatch": "Find who sends feedback on another tenant's rollouts: a mixed-up API key, or a guess.",
    "routing_invalid": "Drop it, and mend the engine's trace; without one its group waits for its deadline.",
    "late": "Drop it: its group is closed. Raise `group_deadline_s` if many come late.",
    "conflicting_repeat": "Drop it: the first one counts. Find who sends other content under the same id.",
    "erased": "Nothing: the person asked for it, and nobody can bring it back.",
    "kills_worker": "Keep it for a bug report (`show`), drop it; replay it only after an upgrade that survives it.",
    "trained": "Nothing: the group was trained on.",
    "equal_rewards": "Nothing: there is no signal in equal rewards.",
    "incomplete": "Look for lost rollouts or slow verifiers; raise `group_deadline_s` if they are only late.",
    "unscorable": "Look at the verifier: too few members of the group could be scored.",
    "group_of_one": "Sample at least two rollouts a prompt.",
    "stale": "Let fleets follow faster, or raise `max_lag_versions`.",
    "too_old": "Bring feedback in sooner (a shorter window), or raise `max_age_s`.",
    "crowded_out": "Raise `production_share` or `groups_per_step`: there is more live traffic than plans take.",
    "coverage": "Look at the outcome class in the notice: why does it earn no signal? Score its silence by a rule, or lower `coverage_floor`.",
    "no_place": "Set `production_share` between 0 and 1, or stop the producer whose groups nobody takes.",
    "over_budget": "Raise `token_budget`, or sample shorter sequences.",
    "abandoned": "Nothing: the worker that held it was shut down and its slot was given back.",
}
"""Reason code -> what to do. A test holds it to the closed set of `rollwire.schemas.reasons`."""
