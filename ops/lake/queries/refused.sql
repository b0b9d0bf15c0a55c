-- What was refused, by whom and why, and where does the first of it stand?
SELECT source.topic AS topic, reason, refused_by, count(*) AS events,
  min_by({'partition': source.partition, 'offset': source.offset}, (refused_us, _partition, _offset)) AS first,
  min(refused_us) AS since, max(refused_us) AS until
FROM dead_letters
GROUP BY ALL
ORDER BY events DESC, topic, reason, refused_by;
