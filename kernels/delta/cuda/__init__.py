"""The CUDA twins of the delta's loops that touch every element; `rollwire.kernels.delta.gpu` runs them."""
