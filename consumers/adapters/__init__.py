"""Trainers whose weights are not all in one process: who publishes what of a sharded module."""
