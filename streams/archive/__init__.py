"""The archive: sealed segments of every topic in the object store, and the proof that nobody changed them."""
