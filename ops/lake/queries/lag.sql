-- How old was what the model was trained on: tokens by lag, in policy versions?
SELECT lineage, one.lag AS lag, sum(one.tokens)::BIGINT AS tokens,
  round(sum(one.tokens) / sum(sum(one.tokens)) OVER (PARTITION BY lineage), 6) AS share
FROM (SELECT lineage, unnest(lag_histogram) AS one FROM train_steps)
GROUP BY lineage, one.lag
ORDER BY lineage, lag;
