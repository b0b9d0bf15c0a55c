"""The lake that `rollwire audit export` writes, asked in SQL."""
