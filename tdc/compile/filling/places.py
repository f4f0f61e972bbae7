"""Rules of filled graphs for operations that read or write at computed positions.

What an index holds in filling may be any number, so it reads position 0; what a write puts there goes to one more
position, which is cut off again, or adds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.compile.filling.run import Graph, bare, rule
from tdc.compile.filling.shapes import from_end
from tdc.compile.filling.sums import IDENTITIES
from tdc.compile.filling.values import Filled, Node, Size, expression, refuse
from tdc.ops.reduce.reduction import finite

aten: Any = torch.ops.aten


def positions(g: Graph, index: Filled, x: Filled, dim: int) -> Tensor:
    """An index into a dim: 0 in filling, and negative ones counted from the real end."""
    found = g.masked(index, 0)
    return from_end(g, x, dim % x.x.ndim, found) if x.x.ndim else torch.zeros_like(found)


@rule("index_select", "gather")
def take(g: Graph, node: Node, x: Filled, dim: int, index: Filled, **kwargs: Any) -> Tensor:
    """Elements at positions along a dim."""
    return node.target(x.x, dim, positions(g, index, x, dim), **kwargs)


@rule("embedding")
def embedding(g: Graph, node: Node, weight: Filled, index: Filled, *args: Any, **kwargs: Any) -> Tensor:
    """Rows of a table."""
    return aten.embedding(weight.x, g.masked(index, 0), *args, **kwargs)


@rule("index", "_unsafe_index")
def index(g: Graph, node: Node, x: Filled, at: Sequence[Any]) -> Tensor:
    """Elements at positions along several dims."""
    return aten.index(x.x, given_index(g, node, x, at))


def given_index(g: Graph, node: Node, x: Filled, at: Sequence[Any]) -> list[Tensor | None]:
    """Positions for each dim; a mask as an index finds as many as only data tell."""
    if any([i is not None and i.x.dtype in (torch.bool, torch.uint8) for i in at]):
        raise refuse(f"{node.target} by a mask")
    return [None if i is None else positions(g, i, x, d) for d, i in enumerate(at)]


@rule("index_put", "_unsafe_index_put")
def index_put(g: Graph, node: Node, x: Filled, at: Sequence[Any], values: Filled, accumulate: bool = False) -> Tensor:
    """Elements written, or added, at positions along the first dims."""
    found = given_index(g, node, x, at)
    block = [d for d, i in enumerate(found) if i is not None]
    if block != list(range(block[0], block[-1] + 1)):
        raise refuse(f"{node.target} of dims that are apart")
    index: list[Any] = [found[d] for d in block]
    masks = [m for d in block if (m := g.mask(at[d])) is not None]
    if not masks:
        return aten.index_put(x.x, found, values.x, accumulate)
    shape = torch.broadcast_shapes(*[i.shape for i in index])
    order = [*block, *[d for d in range(x.x.ndim) if d not in block]]
    moved, (before, rest) = x.x.permute(order), (block[0], x.x.shape[block[-1] + 1 :])
    put = values.x.expand(*x.x.shape[:before], *shape, *rest)
    put = put.movedim(list(range(before, before + len(shape))), list(range(len(shape))))
    mask = all_of(masks).expand(shape)
    if accumulate:
        kept = mask.reshape(*shape, *[1] * (put.ndim - len(shape)))
        out = aten.index_put(moved, index, torch.where(kept, put, torch.zeros_like(put)), True)
    else:
        more = torch.cat([moved, moved.new_zeros(1, *moved.shape[1:])])
        out = aten.index_put(more, [torch.where(mask, index[0], moved.shape[0]), *index[1:]], put)[:-1]
    return out.permute([order.index(d) for d in range(x.x.ndim)])


@rule("nonzero")
def nonzero(g: Graph, node: Node, x: Filled) -> Tensor:
    """Positions of elements other than 0: as many as the bucket has elements, of which the first are real."""
    mask, found = x.x != 0, g.mask(x)
    ends = (mask if found is None else mask & found).flatten().cumsum(0)
    g.count_here(expression(node.meta["val"].shape[0]), ends[-1] if len(ends) else ends.sum())
    at = torch.searchsorted(ends, torch.arange(1, len(ends) + 1, device=ends.device)).clamp(max=max(len(ends) - 1, 0))
    steps = [math.prod(x.x.shape[d + 1 :]) for d in range(x.x.ndim)]
    columns = [at // step % n for step, n in zip(steps, x.x.shape, strict=True)]
    return torch.stack(columns, 1) if columns else at.new_empty(len(at), 0)


@rule("masked_scatter")
def masked_scatter(g: Graph, node: Node, x: Filled, mask: Filled, source: Filled) -> Tensor:
    """Elements of a source in their order, at the real positions of a mask."""
    if {*source.dims} - {0}:
        raise refuse(f"{node.target} of a source whose dims vary behind the first one")
    own = g.mask(x)
    return aten.masked_scatter(x.x, mask.x if own is None else mask.x & own, source.x)


def all_of(masks: Sequence[Tensor]) -> Tensor:
    """True where all masks are."""
    found = masks[0]
    for mask in masks[1:]:
        found = found & mask
    return found


@rule("index_add")
def index_add(g: Graph, node: Node, x: Filled, dim: int, index: Filled, source: Filled, **kwargs: Any) -> Tensor:
    """Slices added at positions along a dim."""
    added = Filled(source.x, tuple([s if d == dim % source.x.ndim else None for d, s in enumerate(source.sizes)]))
    return aten.index_add(x.x, dim, positions(g, index, x, dim), g.masked(added, 0), **kwargs)


def within(x: Filled, dim: int, *parts: Tensor) -> list[Tensor]:
    """An index, and what belongs to it, cut to the sizes of a tensor in all dims but one: behind them is filling."""
    for d, n in enumerate(x.x.shape):
        if d != dim % max(x.x.ndim, 1):
            parts = tuple([part.narrow(d, 0, min(part.shape[d], n)) for part in parts])
    return list(parts)


@rule("scatter_add", "scatter_reduce")
def scatter_reduce(
    g: Graph, node: Node, x: Filled, dim: int, index: Filled, src: Filled, *how: Any, **kw: Any
) -> Tensor:
    """Elements reduced at positions along a dim; filling brings the identity, or goes to one more position."""
    name = how[0] if how else "sum"
    if name == "mean" or not kw.get("include_self", True):
        return written(g, node, x, dim, index, src, *how, **kw)
    identity = finite(IDENTITIES[name], src.x.dtype)
    put = g.masked(Filled(src.x, index.sizes if len(index.sizes) == src.x.ndim else src.sizes), identity)
    return node.target(x.x, dim, *within(x, dim, positions(g, index, x, dim), put), *how, **kw)


@rule("scatter.src", "scatter.value")
def scatter(g: Graph, node: Node, x: Filled, dim: int, index: Filled, src: Any) -> Tensor:
    """Elements written at positions along a dim."""
    if isinstance(src, Size):
        raise refuse(f"{node.target} of a number that varies")
    return written(g, node, x, dim, index, src)


@rule("index_reduce")
def index_reduce(g: Graph, node: Node, x: Filled, dim: int, index: Filled, src: Filled, *how: Any, **kw: Any) -> Tensor:
    """Slices reduced at positions along a dim."""
    more, d, at = with_room(g, x, dim, index)
    return aten.index_reduce(more, d, at, src.x, *how, **kw).narrow(d, 0, x.x.shape[d])


def written(g: Graph, node: Node, x: Filled, dim: int, index: Filled, src: Any, *how: Any, **kw: Any) -> Tensor:
    """A write at positions along a dim."""
    if not index.dims:
        return node.target(x.x, dim, *within(x, dim, positions(g, index, x, dim)), bare(src), *how, **kw)
    more, d, at = with_room(g, x, dim, index)
    at, *put = within(x, d, at, *([src.x] if isinstance(src, Filled) else []))
    return node.target(more, d, at, *(put or [src]), *how, **kw).narrow(d, 0, x.x.shape[d])


def with_room(g: Graph, x: Filled, dim: int, index: Filled) -> tuple[Tensor, int, Tensor]:
    """A tensor with one more position along a dim, the dim, and an index whose filling points there."""
    d = dim % x.x.ndim
    more = x.x.new_zeros([1 if k == d else n for k, n in enumerate(x.x.shape)])
    mask, at = g.mask(index), positions(g, index, x, d)
    return torch.cat([x.x, more], d), d, at if mask is None else torch.where(mask, at, x.x.shape[d])


@rule("searchsorted", "bucketize")
def searchsorted(g: Graph, node: Node, first: Filled, second: Any, **kwargs: Any) -> Tensor:
    """Places among sorted numbers, the real ones."""
    target: Any = node.target
    if isinstance(first, Size) or isinstance(second, Size) or isinstance(kwargs.get("sorter"), Filled):
        raise refuse(f"{target} of a number that varies, or by a sorter")
    sorted_first = "searchsorted" in str(target)
    table, asked = (first, second) if sorted_first else (second, first)
    last = table.x.ndim - 1
    filled = g.masked(table, finite(math.inf, table.x.dtype), (last,))
    found = target(*((filled, bare(asked)) if sorted_first else (bare(asked), filled)), **kwargs)
    return found if last not in table.dims else found.clamp(max=g.number_of(table.sizes[last])).to(found.dtype)


@rule("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(g: Graph, node: Node, *args: Any) -> Any:
    """Bags by offsets, the last of which goes on to the end."""
    raise refuse(f"{node.target} of plain offsets", "pass the NestedTensor of indices itself to nn.EmbeddingBag")


@rule("embedding_dense_backward")
def embedding_backward(g: Graph, node: Node, grad: Filled, index: Filled, *args: Any) -> Tensor:
    """The gradient of a table; filling adds nothing."""
    at = Filled(grad.x, (*index.sizes, None))
    return aten.embedding_dense_backward(g.masked(at, 0), g.masked(index, 0), *args)
