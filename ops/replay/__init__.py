"""Replay of histories on a broker: shadow topics, and how workers open what they read."""
