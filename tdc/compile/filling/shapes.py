"""Rules of filled graphs for operations that make shapes: views, slices, joins, factories."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from tdc.compile.filling.run import Graph, bare, rule
from tdc.compile.filling.values import Expr, Filled, Node, Size, evaluate, expression, refuse

aten: Any = torch.ops.aten


@rule("view.default", "_unsafe_view", "reshape", "unflatten")
def view(g: Graph, node: Node, x: Filled, *sizes: Any) -> Tensor:
    """A view: filling stays behind where a filled dim comes first among the dims that are merged or split; otherwise
    real elements are gathered."""
    given = [expression(n) for n in node.args[0].meta["val"].shape]
    made = [expression(n) for n in node.meta["val"].shape]
    out, at = x.x, 0
    for dims, others in groups(given, made):
        old, new = [given[d] for d in dims], [made[d] for d in others]
        shape = [evaluate(n, g.full) for n in new]
        behind = len(old) + len(new) > 2 and (has_filling_behind(g, old) or has_filling_behind(g, new))
        if behind or prod(shape) != prod(out.shape[at : at + len(old)]):  # as 67 for s, but 2 * 33 for 2 * (s // 2)
            out = out.flatten(at, at + len(old) - 1).index_select(at, places(g, old, new)).unflatten(at, shape)
        else:
            out = out.reshape(*out.shape[:at], *shape, *out.shape[at + len(old) :])
        at += len(new)
    return out


def has_filling_behind(g: Graph, sizes: Sequence[Expr]) -> bool:
    """True if a dim is filled behind the first one that is longer than 1."""
    first = next((k for k, n in enumerate(sizes) if n != 1), 0)
    return any([isinstance(g.number_of(n), Tensor) for n in sizes[first + 1 :]])


def places(g: Graph, old: Sequence[Expr], new: Sequence[Expr]) -> Tensor:
    """For each place of flattened new dims the one of flattened old dims that holds the same real element."""
    shape, real = [evaluate(n, g.full) for n in new], [g.number_of(n) for n in old]
    at: Any = 0
    for d, n in enumerate(shape):
        step = torch.arange(n, device=g.device).view(-1, *[1] * (len(shape) - 1 - d))
        at = at + step * prod([g.number_of(size) for size in new[d + 1 :]])
    index, stride = torch.zeros_like(at), 1
    for d in reversed(range(len(old))):
        size = real[d].clamp(min=1) if isinstance(real[d], Tensor) else max(real[d], 1)
        index, at = index + at % size * stride, at // size
        stride *= evaluate(old[d], g.full)
    return index.flatten().clamp(0, max(stride - 1, 0))


def groups(given: Sequence[Expr], made: Sequence[Expr]) -> list[tuple[list[int], list[int]]]:
    """Dims of two shapes of as many elements that stand for one another."""
    found, i, j = [], 0, 0
    while i < len(given) or j < len(made):
        a, b = i, j
        i, j = min(i + 1, len(given)), min(j + 1, len(made))
        while prod(given[a:i]) != prod(made[b:j]) and (i < len(given) or j < len(made)):
            ahead = i < len(given) and (j == len(made) or len(given) - i >= len(made) - j)
            i, j = (i + 1, j) if ahead else (i, j + 1)
        found.append((list(range(a, i)), list(range(b, j))))
    return found


@rule("_conj", "_neg_view")
def conj(g: Graph, node: Node, x: Filled) -> Tensor:
    """Conjugate, or negative, numbers, not a mark that says so."""
    return torch.conj_physical(x.x) if "conj" in str(node.target) else x.x.neg()


@rule("expand")
def expand(g: Graph, node: Node, x: Filled, *_: Any, **__: Any) -> Tensor:
    """A view of repeated elements."""
    return x.x.expand(g.shape(node.meta["val"]))


@rule("view.dtype")
def view_as(g: Graph, node: Node, x: Filled, dtype: torch.dtype) -> Tensor:
    """A view of the memory in another dtype."""
    if x.x.ndim - 1 in x.dims and dtype.itemsize != x.x.dtype.itemsize:
        raise refuse(f"{node.target} of numbers of another width")
    return x.x.view(dtype)


@rule("repeat")
def repeat(g: Graph, node: Node, x: Filled, times: Sequence[Any]) -> Tensor:
    """Copies; along a filled dim the real elements of all come first."""
    given = [n.full if isinstance(n, Size) else n for n in times]
    for d in x.dims:
        at = len(times) - x.x.ndim + d
        if isinstance(times[at], Size) or given[at] < 1:
            raise refuse(f"{node.target} along a dim that varies")
        x, given[at] = Filled(cat(g, node, [x] * given[at], d), x.sizes), 1
    return x.x.repeat(given)


@rule("slice")
def cut(g: Graph, node: Node, x: Filled, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Tensor:
    """A slice: from a fixed start as it is, else of the real positions counted from the real end."""
    val = node.meta["val"]
    d, count = dim % val.ndim, g.size(val.shape[dim])
    start = 0 if start is None else start
    if isinstance(start, int) and start >= 0:
        return aten.slice(x.x, d, start, start + (count - 1) * step + 1 if count else start, step)
    return g.at(x, d, begin_of(g, x, d, start) + step * torch.arange(count, device=x.x.device))


def begin_of(g: Graph, x: Filled, d: int, start: Any) -> Tensor:
    """Begin of a slice, counted from the real end if it is negative."""
    return from_end(g, x, d, start or 0).clamp(min=0)


def from_end(g: Graph, x: Filled, d: int, at: Any) -> Tensor:
    """Positions along a dim, negative ones counted from the real end."""
    found = torch.as_tensor(at.real if isinstance(at, Size) else at, device=x.x.device)
    return torch.where(found < 0, found + g.count(x, d), found)


@rule("select")
def select(g: Graph, node: Node, x: Filled, dim: int, index: Any) -> Tensor:
    """One position along a dim, counted from the real end where it is negative."""
    d = dim % x.x.ndim
    if isinstance(index, int) and (index >= 0 or d not in x.dims):
        return x.x.select(d, index)
    return g.at(x, d, from_end(g, x, d, index).reshape(1)).squeeze(d)


@rule("cat")
def cat(g: Graph, node: Node, xs: Sequence[Filled], dim: int = 0) -> Tensor:
    """Joined tensors; along a filled dim the real elements of all, then filling."""
    xs = [x for x in xs if x.x.shape != (0,)]
    d = dim % xs[0].x.ndim
    joined = torch.cat([x.x for x in xs], d)
    if not any([d in x.dims for x in xs]):
        return joined
    real = [g.count(x, d) for x in xs]
    full = [0, *accumulate([x.x.shape[d] for x in xs])]
    positions = torch.arange(joined.shape[d], device=joined.device)
    index, begin = positions, 0
    for n, at in zip(real, full, strict=False):
        index = torch.where(positions >= begin, positions - begin + at, index)
        begin = begin + n
    return joined.index_select(d, index.clamp(max=joined.shape[d] - 1))


@rule("constant_pad_nd")
def pad(g: Graph, node: Node, x: Filled, widths: Sequence[Any], value: Any = 0) -> Tensor:
    """Padded tensors: behind real elements the value begins at once."""
    if any([isinstance(n, Size) for n in [*widths[::2], value]]):
        raise refuse(f"{node.target} of widths that vary")
    out = aten.constant_pad_nd(x.x, [n.full if isinstance(n, Size) else n for n in widths], value)
    for k in range(len(widths) // 2):
        d = x.x.ndim - 1 - k
        if d in x.dims:
            ends = g.number_of(x.sizes[d]) + widths[2 * k]
            inside = torch.arange(out.shape[d], device=out.device) < ends
            out = torch.where(inside.view(-1, *[1] * k), out, value)
    return out


@rule("flip")
def flip(g: Graph, node: Node, x: Filled, dims: Sequence[int]) -> Tensor:
    """Reversed order of real elements."""
    wanted = [d % x.x.ndim for d in dims]
    out = aten.flip(x.x, [d for d in wanted if d not in x.dims])
    for d in wanted:
        if d in x.dims:
            index = g.number_of(x.sizes[d]) - 1 - torch.arange(out.shape[d], device=out.device)
            out = g.at(Filled(out, x.sizes), d, index)
    return out


@rule("split_with_sizes")
def split(g: Graph, node: Node, x: Filled, sizes: Sequence[Any], dim: int = 0) -> Any:
    """Pieces of a dim, one behind the other."""
    d = dim % x.x.ndim
    if d not in x.dims:
        return x.x.split_with_sizes(list(sizes), d)
    full = [n.full if isinstance(n, Size) else n for n in sizes]
    begins = accumulate([n.real if isinstance(n, Size) else n for n in sizes], initial=0)
    return [g.at(x, d, torch.arange(n, device=g.device) + begin) for n, begin in zip(full, begins, strict=False)]


@rule("diagonal", "diagonal_scatter", "unfold")
def windows(g: Graph, node: Node, x: Filled, *args: Any, **kwargs: Any) -> Tensor:
    """Diagonals and windows: those of real elements come first."""
    if any([isinstance(n, Size) for n in [*args, *kwargs.values()]]):
        raise refuse(f"{node.target} of a number that varies")
    return node.target(x.x, *bare(args), **kwargs)


@rule("randint")
def randint(g: Graph, node: Node, *args: Any, **kwargs: Any) -> Tensor:
    """Random numbers below a fixed one."""
    *ends, _ = args
    if any([isinstance(n, Size) for n in ends]):
        raise refuse(f"{node.target} of a number that varies")
    return node.target(*ends, g.shape(node.meta["val"]), **kwargs)


@rule("arange")
def arange(g: Graph, node: Node, *given: Any, **_: Any) -> Tensor:
    """Numbers in order: filling goes on with them."""
    start, step = (0, 1) if len(given) == 1 else (given[0], given[2] if len(given) > 2 else 1)
    start, step = [n.real if isinstance(n, Size) else n for n in (start, step)]
    val = node.meta["val"]
    count = g.size(val.shape[0])
    out = torch.arange(count, dtype=val.dtype, device=val.device)
    return (out * step + start).to(val.dtype)


@rule("scalar_tensor", "full", "full_like")
def full(g: Graph, node: Node, *args: Any, **_: Any) -> Tensor:
    """A tensor of one number."""
    val, number = node.meta["val"], args[-1]
    shape, how = g.shape(val), {"dtype": val.dtype, "device": val.device}
    return number.real.to(**how).expand(shape) if isinstance(number, Size) else torch.full(shape, number, **how)


@rule("slice_scatter")
def put_slice(
    g: Graph, node: Node, x: Filled, src: Filled, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Tensor:
    """A tensor with a slice replaced; the filling of the slice replaces nothing."""
    d = dim % x.x.ndim
    size, count = x.x.shape[d], src.x.shape[d]
    if not count:
        return x.x
    behind = torch.arange(size, device=x.x.device) - begin_of(g, x, d, start)
    real = g.count(src, d)
    inside = (behind >= 0) & (behind % step == 0) & (behind // step < real)
    put = g.at(Filled(src.x.to(x.x.dtype), src.sizes), d, behind // step)
    return torch.where(inside.view(-1, *[1] * (x.x.ndim - 1 - d)), put, x.x)


@rule("sym_size")
def size_of(g: Graph, node: Node, x: Filled, dim: int) -> Any:
    """A size as a number."""
    d = dim % x.x.ndim
    return Size(x.x.shape[d], g.count(x, d)) if d in x.dims else x.x.shape[d]


@rule("repeat_interleave.Tensor")
def repeat_interleave(g: Graph, node: Node, repeats: Filled, output_size: Any = None) -> Tensor:
    """Row ids by lengths, for as many positions as the bucket has."""
    if output_size is None:
        raise refuse(f"{node.target} of a total that only the data tells", "name the total: output_size=")
    ends = g.masked(repeats, 0).cumsum(0)
    positions = torch.arange(g.size(node.meta["val"].shape[0]), device=ends.device)
    found = torch.searchsorted(ends, positions, right=True)
    return found.clamp(max=max(ends.shape[0] - 1, 0)).to(node.meta["val"].dtype)
