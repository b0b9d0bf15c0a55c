"""What a person runs: CLI, settings, local stack, provisioning, demo, benchmarks."""
