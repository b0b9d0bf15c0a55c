"""Auditors: what made a version, whether the history is whole, and whether it can be made again."""
