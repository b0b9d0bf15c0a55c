-- How did training go: loss, reward, entropy, speed and time of every step?
SELECT lineage, step, version, loss, reward_mean, grad_norm, entropy, trained_tokens, tokens_per_s, duration_ms, finished_us
FROM train_steps
ORDER BY lineage, step;
