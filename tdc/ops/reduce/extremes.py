"""The largest and smallest elements, and where they are: argmax, argmin, max, min, aminmax.

    max(x)           the largest real element            max(x, y)      element by element
    max(x, 1)        (values, indices), as torch         argmax(x, 1)   positions within each example

Along a ragged dim an index counts the positions of one example. Without a dim `argmax` counts in `x.values.flatten()`,
or in `x.data.flatten()` of a MaskedBatch. Of several equal elements the first is meant, and NaN is both largest and
smallest, as in torch. An example without elements has no position: its index is -1, its value the identity.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tdc.core.container import Container
from tdc.core.rules import define
from tdc.core.typing import Op
from tdc.layout.segments import reduce_rows, spread
from tdc.ops.reduce.along_dim import Segments, at, named_result, not_empty, reduce_along, segments_of
from tdc.ops.reduce.partial_ragged import by_lines, over_lines
from tdc.ops.reduce.reduction import finite
from tdc.ops.tensordict.batch import Along, along, along_dims, along_tensordict
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import Ragged, Results

REDUCE = {-math.inf: torch.amax, math.inf: torch.amin}  # by the value that changes nothing
PAIRED: dict[Op, Op] = {torch.max: torch.maximum, torch.min: torch.minimum}
NONE = torch.iinfo(torch.int64).max
IDENTITY: dict[Op, float] = {torch.max: -math.inf, torch.min: math.inf, torch.argmax: -math.inf, torch.argmin: math.inf}


def extreme_position(segments: Segments, identity: float) -> Tensor:
    """The first position of the extreme of each segment, (K, *D); -1 where there are no elements. NaN is either."""
    values, s = segments.values.detach(), segments.structure
    reduce, none = REDUCE[identity], finite(identity, values.dtype)
    if s is not None:
        found = spread(reduce_rows(values, s, "amax" if identity < 0 else "amin", none), s, values.shape[0])
        position = reduce_rows(torch.where(is_extreme(values, found), segments.positions, NONE), s, "amin", NONE)
        return position.masked_fill(position == NONE, -1)
    assert segments.real is not None
    values, real = not_empty(values), not_empty(segments.real)  # torch reduces no empty dim
    hit = real & is_extreme(values, reduce(values.masked_fill(~real, none), 0, True))
    return hit.to(torch.int32).argmax(0, True).masked_fill(~real.any(0, True), -1)


def is_extreme(x: Tensor, extreme: Tensor) -> Tensor:
    """True where a value is the extreme, or NaN."""
    return (x == extreme) | (x != x)


def arg_ragged(op: Op, x: Any, dim: int | None = None, keepdim: bool = False) -> Ragged | Tensor:
    """`argmax` and `argmin`."""
    if dim is None and isinstance(x, NestedTensor):
        out = op(x.values)
        return out.view([1] * x.ndim) if keepdim else out
    return reduce_along(op, partial(of_segments, op), x, dim, keepdim, None)


def extreme_ragged(op: Op, x: Any, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Results:
    """`max` and `min` in all forms that torch has."""
    if other is not None or isinstance(dim, (Tensor, Container)) or isinstance(x, Tensor):
        return PAIRED[op](x, dim if other is None else other)
    if dim is None:
        return op(x.values) if isinstance(x, NestedTensor) else (x.amax() if op is torch.max else x.amin())
    return reduce_along(op, partial(of_segments, op), x, dim, keepdim, None)


def of_segments(op: Op, x: Any, dim: int | None, keepdim: bool) -> Tensor | tuple[Tensor, ...]:
    """Values and indices of the extremes of segments, of `argmax` and `argmin` the indices alone."""
    segments, identity = segments_of(op, x, dim), IDENTITY[op]
    position = extreme_position(segments, identity)
    if op not in PAIRED:
        return segments.back(position, keepdim)
    found = at(segments, position, finite(identity, segments.values.dtype))
    return named_result(op, segments.back(found, keepdim), segments.back(position, keepdim))


def aminmax_ragged(x: Any, *, dim: int | None = None, keepdim: bool = False) -> Ragged | Tensor | tuple[Any, ...]:
    """Both as `amin` and `amax` give them, with their derivatives."""
    if by_lines(torch.aminmax, x, dim):  # so that both share their lengths
        return over_lines(torch.aminmax, aminmax_ragged, x, dim, keepdim)
    return named_result(torch.aminmax, x.amin(dim, keepdim), x.amax(dim, keepdim))


def extreme_tensordict(op: Op, pointwise: Op, how: Along, *args: Any, **kwargs: Any) -> Any:
    """`torch.max(td, 0)` along a batch dim, `torch.max(td, other)` element by element."""
    if "other" in kwargs or len([a for a in args if isinstance(a, (Tensor, Container))]) > 1:
        return pointwise(*args, **kwargs)
    return along_tensordict(op, how, *args, **kwargs)


for _op in (torch.argmax, torch.argmin):
    along(_op, "input dim*=None keepdim", "extremes", ragged=partial(arg_ragged, _op), identity=IDENTITY[_op])
for _op, _pointwise in PAIRED.items():
    _how = along_dims(_op, "input dim*=None keepdim", over_all=REDUCE[IDENTITY[_op]])
    define(
        _op, "extremes", ragged=partial(extreme_ragged, _op), dims="input dim*=None keepdim", identity=IDENTITY[_op],
        tensordict=partial(extreme_tensordict, _op, _pointwise, _how),
    )  # fmt: skip
along(torch.aminmax, "input dim*=None keepdim", "extremes", ragged=aminmax_ragged)
