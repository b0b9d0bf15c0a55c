"""The command groups of `rollwire`, one file each."""
