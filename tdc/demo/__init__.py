"""The demo: a byte-level classifier of docstrings, ragged against padded."""
