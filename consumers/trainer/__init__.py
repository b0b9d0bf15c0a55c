"""The trainer: one step plan in, one optimiser step, one committed weight version out (laws 3, 6 and 9)."""
