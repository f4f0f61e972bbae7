"""Entries of an index, in words that leave a number free to vary.

In a graph a question by `is` about a slice makes constants of the numbers in it, and so does `getattr` with a default
(Dynamo, torch 2.11-2.15): the graph would serve one index. Questions by `isinstance` do not.
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
