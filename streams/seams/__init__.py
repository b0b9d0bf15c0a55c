"""The seams: one small Protocol for each kind of I/O, its in-memory twin and its live adapter."""
