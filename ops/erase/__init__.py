"""Erasing one person: what their data reached, the destruction of their keys, and the export of what is theirs."""
