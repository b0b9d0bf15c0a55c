-- Do trainer and sampler agree: the mismatch in nats of every version, and the ten worst of environment, fleet and version?
SELECT lineage, version, mismatch.mean AS mean, mismatch.p99 AS p99, mismatch.max AS max,
  mismatch_same_version.p99 AS p99_same_version, ratio_truncated,
  list_slice(list_sort([
    {p99: one.p99, environment: one.environment, fleet: one.fleet, sampled_by: one.version, tokens: one.tokens}
    FOR one IN mismatch_by IF one.version IS NOT NULL], 'DESC'), 1, 10) AS worst
FROM train_steps
ORDER BY lineage, version;
