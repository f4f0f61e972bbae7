"""What a loop computes of its items alone (`hoist`), of the rows of all rounds and examples at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tdc.autobatch import blocks
from tdc.autobatch.lowered import UNDEFINED
from tdc.autobatch.tree import ITEM
from tdc.autobatch.values import Lane, flatten, is_lane
from tdc.autobatch.walks import RaggedRows, Rows, Steps


class Made(Steps):
    """Items that are tuples of what a block has made of each row of a walk."""

    def __init__(self, steps: Rows | RaggedRows, parts: Sequence[Lane]) -> None:
        self.parts = [steps.with_rows(x.data) for x in parts]
        self.lengths, self.device, self.full = steps.lengths, steps.device, steps.full

    def longest(self) -> Any:
        return self.parts[0].longest()

    def item(self, k: Any) -> Any:
        return tuple([p.item(k) for p in self.parts])

    def item_of(self, k: int, at: Tensor | None) -> Any:
        return tuple([p.item_of(k, at) for p in self.parts])

    def table(self) -> Any:
        return tuple([p.table() for p in self.parts])


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
    given = [Lane(rows) if name == ITEM else x for name, x in zip(names, args, strict=True)]
    found = blocks.run(fn, given, rows.shape[0])
    return (Made(steps, found), True) if found and all([is_lane(x) for x in found]) else (steps, False)


def is_shared(x: Any) -> bool:
    """Whether a value is there, and the same for all examples."""
    return x is not UNDEFINED and not any([type(leaf) is Lane for leaf in flatten(x)[0]])
