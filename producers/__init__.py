"""What writes the first event: rollout workers, environments, verifiers."""
