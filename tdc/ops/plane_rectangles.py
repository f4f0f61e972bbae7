"""An operation on rectangles of planes for a ragged batch: on one of all examples, or on a few of near sizes.

    (B, C, -1, -1)  ->  rectangles (E, C, H, W)  ->  (E, D, H', W')  ->  (B, D, -1, -1)

One rectangle computes most where sizes differ most, and several take more launches. So large planes of many channels go
in several, and small ones in one: by the work for each position, and by sizes that the host knows, where it does.

Invariant: what lies behind an example's end in a rectangle looks like the operation's own padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.layout.rectangles import Rectangles, from_rectangles, near_sizes, to_rectangles
from tdc.layout.segments import counts_on_host, sizes_of, structure_of_sizes, tell
from tdc.layout.structure import Structure, once
from tdc.ops.plane_rows import PlaneRows, plane_rows
from tdc.ops.spatial import Sizes, Span, filled, resized, sizes_after
from tdc.ragged.nested import NestedTensor


def on_rectangles(
    m: Sizes, spans: Sequence[Span], run: Callable[[Tensor], Tensor], weight: Tensor, steps: int = 1
) -> Any:
    """The results of a batch that is `measured`.

    Args:
        run: the operation on a rectangle, (E, C, *P) -> (E, D, *Q).
        weight: each number of it is a product for each position, one in `steps` of them.
    """
    x = m.source
    if isinstance(x, NestedTensor) and counts_on_host(x.structure):
        fixed = tuple([n for d, n in enumerate(m.widest) if d not in m.ragged])
        s = x.structure if not fixed else with_fixed(x.structure, fixed)
        r = near_sizes(weight.numel() / steps * x.dtype.itemsize, s)
        if r is not None:
            return on_several(plane_rows(m, spans), s, r, spans, run)
    p = filled(m, spans)
    return resized(p, run(p.data), spans)


def on_several(
    p: PlaneRows, s: Structure, r: Rectangles, spans: Sequence[Span], run: Callable[[Tensor], Tensor]
) -> Any:
    """The results of the rectangles, put together; planes of the operand lie as `s` says."""
    inside = [p.order.index(d) + 1 for d in range(len(p.order))]
    behind = [d + 2 for d in p.order]
    parts = [run(t.permute(0, -1, *inside)).permute(0, *behind, 1) for t in to_rectangles(p.x, s, r)]
    used = p.ordered(spans)
    if not all([span.same for span in used]):
        s, r = after(s, r, tuple(used))
    return p.done(from_rectangles(parts, s, r, p.total))


@once
def after(s: Structure, r: Rectangles, spans: tuple[Span, ...]) -> tuple[Structure, Rectangles]:
    """The planes of results, and their rectangles."""
    out = structure_of_sizes(sizes_after(sizes_of(s).unbind(1), spans))
    return out, r.of(lambda size: [span.at(n) for span, n in zip(spans, size, strict=True)])


@once
def with_fixed(s: Structure, fixed: tuple[int, ...]) -> Structure:
    """The structure of planes that have dims of one size for all examples behind the ragged ones."""

    def planes(sizes: Tensor) -> Tensor:
        return torch.cat([sizes, *[sizes.new_full((sizes.shape[0], 1), n) for n in fixed]], 1)

    return tell(structure_of_sizes(planes(sizes_of(s))), [s], lambda known: planes(known[0]))
