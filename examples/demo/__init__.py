"""The demo: a byte-level classifier of docstrings, ragged against padded, compiled whole and exported."""

from examples.demo.pipeline import run as run
