"""Measurements that anyone can repeat: `rollwire bench ...`."""
