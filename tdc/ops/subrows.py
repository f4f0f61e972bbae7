"""Example by example on CPU: where a call for each example beats index arithmetic and padding for all of them.

A call costs microseconds, however large the example; what it saves grows with the example: positions of padding, a
search for each position, a second sort by example. So a loop runs where examples are large enough, and only where
lengths are at hand: not in a graph, nor under a transform of `torch.func` or a dispatch mode (as export traces), and
not on a device.

Invariants: results and gradients are those of the other way; the choice reads metadata.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tdc.core.dynamo import readable
from tdc.ragged.segments import lengths_on_host
from tdc.ragged.structure import Structure

LEAST = 2048  # elements to copy in the time of a call: 5 to 8 us (one thread, 2.13)


def pays(values: Tensor, rows: int, work: int) -> bool:
    """Whether a loop over so many examples is faster.

    Args:
        work: about how many elements the other way writes, padding and indices included.
    """
    return readable() and values.device.type == "cpu" and worth_calls(rows, work)


def worth_calls(rows: int, work: int) -> bool:
    """Whether so much work is worth a call for each example."""
    return rows > 0 and work >= rows * LEAST


def rows_of(values: Tensor, s: Structure) -> Sequence[Tensor]:
    """The examples as views."""
    rows = values.split(lengths_on_host(s), s.packed_dim)
    if s.shapes is None:
        return rows
    return [r.unflatten(s.packed_dim, z) for r, z in zip(rows, s.shapes.tolist(), strict=True)]
