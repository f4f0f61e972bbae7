"""What a loop computes of its items alone (`hoist`), of the rows of all rounds and examples at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tdc.autobatch import blocks
from tdc.autobatch.tree import ITEM
from tdc.autobatch.values import UNDEFINED, Lane, flatten, is_lane, lane_of
from tdc.autobatch.walks import RaggedRows, Rows, Steps, Together


def made(
    steps: Steps, fn: Callable[..., Any], names: Sequence[str], args: Sequence[Any], inside: Any = None
) -> tuple[Steps, bool]:
    """The steps of what a block makes of the items of others, and whether it made them: of rows, where all else that it
    reads is the same for all examples."""
    others = [x for name, x in zip(names, args, strict=True) if name != ITEM]
    if inside is not None or not isinstance(steps, (Rows, RaggedRows)) or not all([is_shared(x) for x in others]):
        return steps, False
    rows = steps.every()
    if rows.shape[0] == 0:
        return steps, False
    given = [lane_of(rows) if name == ITEM else x for name, x in zip(names, args, strict=True)]
    found, spec = flatten(tuple(blocks.run(fn, given, rows.shape[0])))
    if not found or not all([is_lane(x) for x in found]):
        return steps, False
    return Together([steps.with_rows(x.data) for x in found], spec), True


def is_shared(x: Any) -> bool:
    """Whether a value is there, and the same for all examples."""
    return x is not UNDEFINED and not any([type(leaf) is Lane for leaf in flatten(x)[0]])
