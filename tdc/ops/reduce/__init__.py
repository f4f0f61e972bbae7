"""Reductions, orders, extremes and scans, over whole examples and along one dim."""
