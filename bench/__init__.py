"""Benchmarks: one question per file. `python -m bench.<name>` answers one, `make bench` all of them."""
