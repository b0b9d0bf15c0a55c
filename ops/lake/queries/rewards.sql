-- Does the model get better: mean reward by environment, by the version that began the rollout?
WITH begun AS (
  SELECT DISTINCT ON (rollout_id) rollout_id, lineage, environment, spans[1].version AS version
  FROM rollouts ORDER BY rollout_id, _timestamp, _partition, _offset
), scored AS (
  SELECT DISTINCT ON (_event_id) _event_id, rollout_id, source, reward
  FROM rewards ORDER BY _event_id, _timestamp, _partition, _offset
)
SELECT lineage, environment, version, source, count(*) AS rollouts, count(reward) AS scored,
  avg(reward) AS reward_mean, count(*) FILTER (reward > 0) AS positive
FROM begun JOIN scored USING (rollout_id)
GROUP BY ALL
ORDER BY lineage, environment, version, source;
