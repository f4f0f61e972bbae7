"""Dims moved, regrouped, joined, split, and rows of other lengths."""
