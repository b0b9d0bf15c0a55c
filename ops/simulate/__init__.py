"""Seeded simulation: the real processors over an in-memory log, store and clock that lose, delay and kill (T9)."""
