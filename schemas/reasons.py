"""The closed set of reason codes: why an event was refused, why a group was not trained on.

A new code is added here and nowhere else; the documentation and the monitor's tables follow from it.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

Reason = Literal[
    # the codec refuses: the bytes are not the event they claim to be
    "tombstone_not_allowed",  # a null value on a topic that is not compacted
    "too_large",  # longer than the topic's limit, refused before decoding
    "not_framed",  # neither single-object encoding nor a known framing
    "unknown_schema",  # a fingerprint that no released schema has
    "wrong_schema",  # a known schema, of another topic
    "malformed",  # the body does not decode
    "trailing_bytes",  # bytes after the body
    "limit_exceeded",  # counts or depth beyond the limits
    "header_mismatch",  # CloudEvents headers are missing or contradict the value
    "key_mismatch",  # the record's key is not the one the event demands
    "not_finite",  # NaN or infinity where it may not be
    "time_invalid",  # not microseconds since the epoch between 2000 and 2100: seconds, milliseconds, nanoseconds
    "inconsistent",  # fields contradict one another
    "erased",  # the person's data key was destroyed on request: the content is gone
    "kills_worker",  # whoever decoded it died, time and again: kept as it came, not decoded any more
    # rollouts
    "logprob_length",  # not one logprob per sampled token
    "logprob_missing",  # a logprob that was not recorded
    "span_invalid",  # spans do not tile the sampled tokens in order
    "segment_invalid",  # segments do not tile the tokens, or the mask trains on what was not sampled
    "array_length",  # an array's byte length does not fit its dtype and count
    "id_invalid",  # an id is not of its form, or its parts disagree
    "sequence_empty",  # nothing to train on
    "version_future",  # a version that was not published yet
    "lineage_abandoned",  # sampled from a lineage that is no longer trained, or from a version that a revert gave up
    "sharing_invalid",  # a shared token is not what its origin has, or would not be trained on exactly once
    "seal_invalid",  # a seal is not of its form, or content that must be sealed is not
    # rewards
    "reward_invalid",  # the reward is outside its range or contradicts its components
    # feedback
    "unknown_signal",  # the rules have no such signal
    "value_missing",  # a signal that needs a value came without one
    "value_out_of_range",  # outside the signal's range, or none of its values; never clamped
    "label_unknown",  # the signal has no such label
    "unknown_rollout",  # no rollout of this id came within the window
    "tenant_mismatch",  # the rollout belongs to another tenant
    # routing traces
    "routing_invalid",  # rows, ids or dtype do not fit the rollout
    # joins
    "late",  # arrived after its group was closed, or older than the late horizon
    "conflicting_repeat",  # the same id again with other content
    # groups, in `group-fates`
    "trained",  # kept: laid out in a step plan
    "equal_rewards",  # every member has exactly the same reward: no signal
    "incomplete",  # members or rewards were missing at the deadline
    "unscorable",  # too few members could be scored
    "group_of_one",  # nothing to compare with
    "stale",  # the oldest span would be older than `max_lag_versions` at the version of use
    "too_old",  # a production rollout older than `max_age_s` when a plan could have taken it
    "crowded_out",  # more production rollouts waited than `max_waiting`: the oldest give way
    "coverage",  # too few rollouts of an outcome class had a signal: the cohort is not trained on
    "no_place",  # of a kind that no plan takes: `production_share` is 0, or 1
    "over_budget",  # one sequence alone is longer than the token budget
    "abandoned",  # handed back by a worker that shut down
]

REASONS: Final[tuple[Reason, ...]] = get_args(Reason)
