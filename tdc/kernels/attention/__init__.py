"""Attention within packed rows: the operator, its kernels, and the same on rectangles in plain operations."""
