"""Entries of an index, told apart without constants of a graph.

In a graph a question by `is` about a slice makes constants of its numbers, and so does `getattr` with a default
(Dynamo, torch 2.11-2.15); `isinstance` does not.
"""

from __future__ import annotations

from types import EllipsisType, NoneType
from typing import Any

GAP = EllipsisType  # the class of `...`
NEW_DIM = NoneType  # the class of `None`


def entries_of(index: Any) -> tuple[Any, ...]:
    """The entries of an index, of which a tuple has several."""
    entries: Any = index
    return entries if isinstance(index, tuple) else (entries,)
