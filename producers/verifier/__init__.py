"""The verifier: scores rollouts in a process with limits and writes `rewards` exactly once."""
