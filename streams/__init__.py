"""Pure step functions, the runtimes that drive them, and the seams to the outside world."""
