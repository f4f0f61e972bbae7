"""Attention within rows: what torch calls, and the kernels that run it."""
