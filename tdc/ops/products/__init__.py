"""Sums of products, linear algebra and distances."""
