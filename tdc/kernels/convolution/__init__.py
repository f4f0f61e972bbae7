"""Convolution of packed examples of different sizes: the operator, its kernels, and what windows read."""
