"""Environments: where prompts come from and how a trajectory is judged. None of them needs torch."""
