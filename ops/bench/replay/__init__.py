"""`rollwire bench replay`: what audits cost, against the least that reading the same costs."""
