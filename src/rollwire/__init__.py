"""Rollwire: the event-sourced data plane for RL post-training of language models."""
