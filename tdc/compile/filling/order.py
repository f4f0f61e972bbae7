"""Rules of filled graphs for operations that sort, or count by value."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tdc.compile.filling.run import Graph, rule
from tdc.compile.filling.sums import count_of, named
from tdc.compile.filling.values import Filled, Node, Size, refuse
from tdc.ops.reduce.reduction import finite

aten: Any = torch.ops.aten


def ordered(g: Graph, x: Filled, dim: int, down: bool) -> Any:
    """Sorted real elements first; equal ones stay in order, so that filling is behind real extremes."""
    dtype = x.x.dtype
    last = finite(-math.inf, dtype) if down else math.nan if dtype.is_floating_point else finite(math.inf, dtype)
    return torch.sort(g.masked(x, last, (dim % x.x.ndim,)), stable=True, dim=dim, descending=down)


@rule("sort")
def sort(g: Graph, node: Node, x: Filled, *args: Any, **kwargs: Any) -> Any:
    """Sorted elements."""
    given = named(node, args, kwargs)
    return ordered(g, x, given.get("dim", -1), given.get("descending", False))


@rule("topk")
def topk(g: Graph, node: Node, x: Filled, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """The first of sorted elements."""
    if isinstance(k, Size):
        raise refuse(f"{node.target} of a number that varies")
    if dim % x.x.ndim not in x.dims:
        return aten.topk(x.x, k, dim, largest, sorted)
    found = ordered(g, x, dim, largest)
    return found[0].narrow(dim, 0, k), found[1].narrow(dim, 0, k)


@rule("mode", "nanmedian")
def in_order(g: Graph, node: Node, x: Filled, *args: Any, **kwargs: Any) -> Any:
    """Elements by their order, along a dim without filling."""
    dim = named(node, args, kwargs).get("dim", -1 if "mode" in str(node.target) else None)
    if dim is None or dim % x.x.ndim in x.dims:
        raise refuse(str(node.target))
    return node.target(x.x, *args, **kwargs)


@rule("kthvalue", "median.dim")
def in_place(g: Graph, node: Node, x: Filled, *args: Any, **kwargs: Any) -> Any:
    """An element by its place in the order of a dim."""
    given = named(node, args, kwargs)
    d = given.get("dim", -1) % max(x.x.ndim, 1)
    if d not in x.dims:
        return node.target(x.x, *args, **kwargs)
    k, count = given.get("k"), g.count(x, d)
    if isinstance(k, Size):
        raise refuse(f"{node.target} of a number that varies")
    values, index = ordered(g, x, d, False)
    at = torch.as_tensor((count - 1) // 2 if k is None else k - 1, device=values.device)
    if k is None:
        last = values.index_select(d, (count - 1).clamp(min=0).view(1))
        at = torch.where(last.isnan(), count - 1, at)
    at = at.expand([1 if n == d else size for n, size in enumerate(values.shape)]).clamp(min=0)
    found = [part.gather(d, at) for part in (values, index)]
    return tuple(found) if given.get("keepdim") else tuple([part.squeeze(d) for part in found])


@rule("median.default")
def median(g: Graph, node: Node, x: Filled) -> Tensor:
    """The lower one of the middle elements; NaN if there is one."""
    real = g.masked(Filled(torch.ones_like(x.x, dtype=torch.bool), x.sizes), False).flatten()
    values, count = x.x.flatten(), count_of(g, x, range(x.x.ndim))
    last = finite(math.inf, values.dtype)
    ordinary = torch.where(real & ~values.isnan(), values, last).sort().values
    middle = ordinary.index_select(0, ((count - 1) // 2).clamp(min=0).view(1)).squeeze(0)
    return torch.where((real & values.isnan()).any(), math.nan, middle) if values.is_floating_point() else middle


@rule("bincount")
def bincount(g: Graph, node: Node, x: Filled, weights: Any = None, *_: Any) -> Tensor:
    """Numbers of elements of each value, up to a size that is known."""
    val = node.meta["val"]
    added = torch.ones_like(x.x, dtype=val.dtype) if weights is None else weights.x.to(val.dtype)
    at = g.masked(Filled(added, x.sizes), 0)
    return torch.zeros(g.shape(val), dtype=val.dtype, device=at.device).index_add(0, g.masked(x, 0).long(), at)


@rule("histc")
def histc(g: Graph, node: Node, x: Filled, bins: int = 100, low: float = 0, high: float = 0) -> Tensor:
    """Numbers of elements in bins between two numbers; none of filling is."""
    if low == high:
        raise refuse(f"{node.target} between the extremes of data", "name min= and max=")
    return aten.histc(g.masked(x, low - 1), bins, low, high)
