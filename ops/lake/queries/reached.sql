-- Which version was a rollout trained into, from which group, with which reward?
WITH laid_out AS (
  SELECT DISTINCT lineage, step, plan_digest, unnest(flatten([one.rollout_ids FOR one IN microbatches])) AS rollout_id
  FROM packed_batches
), scored AS (
  SELECT rollout_id, arg_min(reward, (_timestamp, _offset)) AS reward FROM rewards GROUP BY rollout_id
)
SELECT rollout_id, regexp_replace(rollout_id, '\.[0-9]+$', '') AS group_id, reward, lineage, step, version,
  finished_us AS trained_us
FROM laid_out JOIN train_steps USING (lineage, step, plan_digest) LEFT JOIN scored USING (rollout_id)
ORDER BY version, rollout_id;
