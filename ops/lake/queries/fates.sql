-- What became of the groups, hour by hour: kept, filtered or dropped, by whom, and why?
SELECT hour, fate, reason, decided_by, count(*) AS groups, round(avg(reward_mean), 4) AS reward_mean
FROM group_fates
GROUP BY ALL
ORDER BY hour, groups DESC, fate, reason, decided_by;
