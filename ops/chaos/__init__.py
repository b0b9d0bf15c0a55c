"""Faults on purpose: a known load, processes that are killed and paused, and a verdict on what readers saw."""
