"""Load on the feedback gateway and on attribution: what `rollwire bench feedback` runs."""
