"""Arithmetic on arrays, no I/O: policy, packing, losses, delta codec, digests."""
