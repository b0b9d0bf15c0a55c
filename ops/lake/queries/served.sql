-- Which fleet served which version, on how many replicas, from when, and how long did the swap hold it up?
SELECT fleet, version, count(DISTINCT replica) AS replicas, min(at_us) AS first_served, max(at_us) AS last_swap,
  max(pause_ms) AS pause_ms_max, quantile_cont(stage_ms, 0.5) AS stage_ms_median, sum(fetched_bytes)::BIGINT AS fetched_bytes
FROM fleet_status
WHERE state = 'swapped'
GROUP BY ALL
ORDER BY fleet, version;
