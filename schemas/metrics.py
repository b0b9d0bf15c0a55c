"""The closed set of metric names. Dashboards, alarms and documentation derive from it.

Names follow Prometheus: base units, the unit last, `_total` on counters. Labels are in brackets.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

Metric = Literal[
    # every processor
    "rollwire_events_received_total",  # [topic] records read
    "rollwire_events_accepted_total",  # [topic] records that passed the codec and were acted on
    "rollwire_events_refused_total",  # [topic, reason] records sent to dead-letters
    "rollwire_events_shed_total",  # [topic, reason] answered 429 or 5xx by the gateway
    "rollwire_events_pending",  # [topic] read and not decided, gauge
    "rollwire_transaction_seconds",  # [processor] begin to commit, histogram
    "rollwire_transactions_unknown_total",  # [processor] outcomes that had to be looked up (law 4)
    "rollwire_consumer_lag_events",  # [topic, partition] last stable offset minus position, gauge
    # feedback gateway
    "rollwire_feedback_start_time_seconds",  # Unix time from which on it counts, gauge
    "rollwire_feedback_repeated_total",  # [topic] accepted events that were in the log before
    "rollwire_feedback_late_total",  # [topic] acknowledged after their caller was told that the outcome is unknown
    "rollwire_feedback_request_seconds",  # whole request to its answer, histogram
    "rollwire_feedback_commit_seconds",  # one write to the log, histogram
    "rollwire_feedback_commit_events",  # events of one write, histogram
    # producers
    "rollwire_rollouts_open",  # [replica] requests that are sampled now, gauge
    "rollwire_tokens_sampled_total",  # [replica]
    "rollwire_rollout_seconds",  # [environment] start to finish, histogram
    "rollwire_score_seconds",  # [verifier] one rollout, histogram
    # streams
    "rollwire_groups_open",  # [partition] waiting for members, rewards or traces, gauge
    "rollwire_groups_total",  # [fate, reason]
    "rollwire_group_age_seconds",  # [fate] opening to decision, histogram
    "rollwire_pack_fill_ratio",  # tokens over budget of each microbatch, histogram
    "rollwire_lag_versions",  # of the oldest span at the version of use, histogram
    # trainer and weights
    "rollwire_step_seconds",  # one optimiser step, histogram
    "rollwire_mismatch_nats",  # [quantile] |log pi - log mu| per token, gauge
    "rollwire_publish_seconds",  # step taken to version event committed, histogram
    "rollwire_delta_bytes",  # stored bytes of a version, histogram
    "rollwire_stage_seconds",  # [replica] version event to staged and verified, histogram
    "rollwire_swap_pause_seconds",  # [replica] sampling stood still, histogram
    "rollwire_served_version",  # [replica] gauge
    # archive
    "rollwire_archive_records_total",  # records copied into the archive
    "rollwire_archive_bytes_total",  # bytes that it stored for them
    "rollwire_archive_expired_total",  # stretches that were over their time
    "rollwire_archive_epoch",  # the newest sealed epoch, gauge
    "rollwire_archive_wrong_segments",  # segments that the log has otherwise than they were sealed, gauge
    "rollwire_archive_waiting_seconds",  # age of the oldest sealed record that is not copied, gauge
    "rollwire_archive_round_age_seconds",  # since the last round that ended well, gauge
]

METRICS: Final[tuple[Metric, ...]] = get_args(Metric)
