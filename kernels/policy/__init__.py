"""The built-in policy: a small Qwen3-MoE in torch, its sampler, its weights on disk and its warm start."""
