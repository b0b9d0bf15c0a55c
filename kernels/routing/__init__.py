"""Routing traces: expert ids to packed bytes and back, and traces of several turns as one."""
