"""Results that are kept for the arguments they were computed of: of metadata, which says the same at every call.

Invariant: in graphs nothing is kept. What is computed of a batch is kept on its structure (`layout.structure.once`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

from torch import Size

from tdc.core.dynamo import trace_as

Args = TypeVarTuple("Args")
Out = TypeVar("Out")

INTS, SEQUENCES, NONE = frozenset({int}), (tuple, list, Size), object()
MOST = 1024  # results of a function, before it forgets them and begins anew


def kept_for_ints(fn: Callable[[*Args], Out]) -> Callable[[*Args], Out]:
    """Keep what a function of ints, tuples and lists of ints, text and functions returned.

    Of others it is computed at each call: True and 1.0 are equal to 1, and may have to be refused.

    Example:
        >>> kept_for_ints(lambda *sizes: [*sizes])(2, 3)
        [2, 3]
    """
    memo: dict[Any, Out] = {}

    def kept(*args: *Args) -> Out:
        key = tuple([hashed(x) for x in args])
        if NONE in key:
            return fn(*args)
        found = memo.get(key)
        if found is None:
            if len(memo) == MOST:
                memo.clear()
            found = memo[key] = fn(*args)
        return found

    trace_as(kept, fn)
    return kept


def hashed(x: Any) -> Any:
    """An argument as part of a key, or NONE where one of another kind may be equal to it."""
    if type(x) in SEQUENCES:
        return tuple(x) if INTS.issuperset(map(type, x)) else NONE
    return x if type(x) in (int, str) or callable(x) else NONE
