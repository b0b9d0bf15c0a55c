-- What do people say: signals by the hour, from how many persons about how many rollouts?
WITH said AS (
  SELECT DISTINCT ON (_event_id) _event_id, hour, tenant, signal, value, label, rollout_id, nullif(subject, '') AS subject
  FROM user_feedback ORDER BY _event_id, _timestamp, _partition, _offset
)
SELECT hour, tenant, signal, label, count(*) AS events, avg(value) AS value_mean,
  count(DISTINCT rollout_id) AS rollouts, count(DISTINCT subject) AS persons
FROM said
GROUP BY ALL
ORDER BY hour, tenant, signal, label NULLS FIRST;
