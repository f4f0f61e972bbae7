"""Layers and norms over features, channels and positions."""
