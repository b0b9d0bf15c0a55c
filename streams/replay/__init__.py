"""Processors run again over history: as it was, or with other settings."""
