"""Lossless deltas between two states: bit operations only (law 5). `format` documents the bytes."""
