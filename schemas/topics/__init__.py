"""The topics, one file each: owner, key, partitions, retention, schemas."""
