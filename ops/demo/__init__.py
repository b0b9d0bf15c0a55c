"""`rollwire demo`: the whole loop on one machine, watched on one page."""
