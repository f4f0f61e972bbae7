"""Rules of filled graphs for operations that reduce dims, or contract them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.compile._torch.filled import operator_of
from tdc.compile.filling.run import Graph, bare, rule
from tdc.compile.filling.values import Filled, Node, Size, larger, refuse
from tdc.ops.reduce.reduction import finite

aten: Any = torch.ops.aten
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


IDENTITIES: dict[str, float] = {
    "sum": 0, "prod": 1, "any": 0, "all": 1, "amax": -math.inf, "amin": math.inf, "max": -math.inf, "min": math.inf,
    "argmax": -math.inf, "argmin": math.inf, "logsumexp": -math.inf, "count_nonzero": 0, "_softmax": -math.inf,
    "_log_softmax": -math.inf, "cumsum": 0, "cumprod": 1, "cummax": -math.inf, "cummin": math.inf,
    "linalg_vector_norm": 0, "nansum": 0, "logcumsumexp": -math.inf,
}  # fmt: skip


@rule(*IDENTITIES)
def reduce(g: Graph, node: Node, x: Filled, *args: Any, **kwargs: Any) -> Any:
    """A reduction, or a scan, with its identity in the filling."""
    target, given = node.target, named(node, args, kwargs)
    name = target.__name__.split(".")[0]
    dims = reduced(x, given.get("dim"))
    if name in ("argmax", "argmin") and given.get("dim") is None and x.dims != (0,) and x.x.ndim > 1:
        raise refuse(f"{target} of all elements")
    if name == "linalg_vector_norm" and given.get("ord", 2) <= 0:
        raise refuse(f"{target} of order {given['ord']}")
    return target(g.masked(x, finite(IDENTITIES[name], x.x.dtype), dims), *args, **kwargs)


def named(node: Node, args: Sequence[Any], kwargs: dict[str, Any], first: int = 1) -> dict[str, Any]:
    """Arguments by their names, from the first one of `args`: by default the second of the operator."""
    op = operator_of(node.target)
    return {**dict(zip(list(op.arguments if op else ())[first:], args, strict=False)), **kwargs}


def count_of(g: Graph, x: Filled, dims: Sequence[int]) -> Any:
    """Number of real elements along some dims."""
    return math.prod([g.count(x, d) for d in dims])


@rule("sym_numel")
def numel(g: Graph, node: Node, x: Filled) -> Any:
    """The number of elements."""
    return Size(x.x.numel(), count_of(g, x, range(x.x.ndim)))


def reduced(x: Filled, dim: Any) -> list[int]:
    """Dims that are reduced, all of them by default."""
    dims = [dim] if isinstance(dim, int) else dim
    return [d % max(x.x.ndim, 1) for d in dims] if dims else list(range(x.x.ndim))


@rule("mean")
def mean(g: Graph, node: Node, x: Filled, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The sum of real elements by their number."""
    dims = reduced(x, dim)
    own = dtype or x.x.dtype
    total = g.masked(x, 0).sum(dims, keepdim, dtype=WIDE.get(own, own))
    return (total / count_of(g, x, dims)).to(own)


@rule("var", "var_mean")
def var(g: Graph, node: Node, x: Filled, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Any:
    """The variance of real elements, with the mean for `var_mean`."""
    dims, own = reduced(x, dim), x.x.dtype
    values, count = x.x.to(WIDE.get(own, own)), count_of(g, x, dims)
    middle = g.masked(Filled(values, x.sizes), 0).sum(dims, True) / count
    squares = g.masked(Filled((values - middle).abs().square(), x.sizes), 0).sum(dims, keepdim)
    found = (squares / larger(count - (1 if correction is None else correction), 0)).to(own.to_real())
    if "var_mean" not in str(node.target):
        return found
    return found, (middle if keepdim else middle.squeeze(dims)).to(own)


@rule("_native_batch_norm_legit_no_training")
def trained_norm(g: Graph, node: Node, x: Filled, *args: Any) -> Any:
    """Batch norm by statistics that are given."""
    return node.target(x.x, *bare(args))


@rule("_native_batch_norm_legit_functional", "_native_batch_norm_legit.no_stats")
def batch_norm(g: Graph, node: Node, x: Filled, weight: Any, bias: Any, *args: Any) -> Any:
    """Batch norm with the statistics of real positions."""
    *running, training, momentum, eps = bare(args)
    weight, bias = bare((weight, bias))
    if not training:
        return node.target(x.x, weight, bias, *running, training, momentum, eps)
    dims = [d for d in range(x.x.ndim) if d != 1]
    values, count = x.x.to(WIDE.get(x.x.dtype, x.x.dtype)), count_of(g, x, dims)
    shape = [-1, *[1] * (x.x.ndim - 2)]
    middle = g.masked(Filled(values, x.sizes), 0).sum(dims, True) / count
    spread = g.masked(Filled((values - middle).square(), x.sizes), 0).sum(dims) / count
    scale = (spread + eps).rsqrt()
    out = (values - middle) * scale.view(shape)
    out = out if weight is None else out * weight.view(shape)
    out = out if bias is None else out + bias.view(shape)
    middle = middle.flatten()
    now = (middle, spread * count / (count - 1))
    moved = [old + momentum * (new - old) for old, new in zip(running, now, strict=False)]
    return out.to(x.x.dtype), middle, scale, *moved


@rule("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm")
def layer_norm(g: Graph, node: Node, x: Filled, *args: Any, **kwargs: Any) -> Any:
    """A norm over last dims."""
    shape = args[0] if "backward" not in str(node.target) else args[1]
    if not any([isinstance(n, Size) for n in shape]):
        return node.target(x.x, *bare(args), **bare(kwargs))
    if "native_layer_norm." not in str(node.target):
        raise refuse(str(node.target))
    weight, bias, eps = bare(args[1:])
    dims = list(range(x.x.ndim - len(shape), x.x.ndim))
    values, count = x.x.to(WIDE.get(x.x.dtype, x.x.dtype)), count_of(g, x, dims)
    middle = g.masked(Filled(values, x.sizes), 0, dims).sum(dims, True) / count
    spread = g.masked(Filled((values - middle).square(), x.sizes), 0, dims).sum(dims, True) / count
    scale = (spread + eps).rsqrt()
    out = (values - middle) * scale
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias).to(x.x.dtype), middle, scale


@rule("native_group_norm")
def group_norm(g: Graph, node: Node, x: Filled, weight: Any, bias: Any, n: Any, c: Any, hw: Any, *args: Any) -> Any:
    """A norm over groups of channels of whole examples."""
    weight, bias = bare((weight, bias))
    groups, eps = args
    if isinstance(c, Size):
        raise refuse(str(node.target))
    if not isinstance(hw, Size):
        return aten.native_group_norm(x.x, weight, bias, getattr(n, "full", n), c, hw, groups, eps)
    values, shape = x.x.to(WIDE.get(x.x.dtype, x.x.dtype)), [-1, c, *[1] * (x.x.ndim - 2)]

    def mean(t: Tensor) -> Tensor:
        total = g.masked(Filled(t, x.sizes), 0).flatten(2).sum(2)
        return total.unflatten(1, (groups, -1)).sum(2) / (hw.real * (c // groups))

    def put(t: Tensor) -> Tensor:
        return t.repeat_interleave(c // groups, 1).view(shape)

    middle = mean(values)
    scale = (mean((values - put(middle)).square()) + eps).rsqrt()
    out = (values - put(middle)) * put(scale)
    out = out if weight is None else out * weight.view(shape)
    return (out if bias is None else out + bias.view(shape)).to(x.x.dtype), middle, scale


@rule("remainder", "fmod", "floor_divide", "div")
def divide(g: Graph, node: Node, x: Any, by: Any, *args: Any, **kwargs: Any) -> Any:
    """A division, by 1 in filling: of whole numbers one by 0 is an error."""
    by = Filled(g.masked(by, 1), by.sizes) if isinstance(by, Filled) and not by.x.is_floating_point() else by
    return g.plain(node, (x, by, *args), kwargs).x


@rule("clamp.default")
def clamp(g: Graph, node: Node, x: Filled, *args: Any, **kwargs: Any) -> Tensor:
    """Numbers between others, some of which vary."""
    given = named(node, args, kwargs)
    ends = [n.real if isinstance(n, Size) else n for n in (given.get("min"), given.get("max"))]
    if not any([isinstance(n, Tensor) for n in ends]):
        return aten.clamp(x.x, *ends)
    numbers = [torch.as_tensor(n, dtype=torch.float64) if isinstance(n, float) else n for n in ends]
    return aten.clamp(x.x, *[None if n is None else torch.as_tensor(n, device=x.x.device) for n in numbers])


@rule("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot")
def product(g: Graph, node: Node, *args: Any, **kwargs: Any) -> Tensor:
    """A product of matrices; along a contracted dim filling is zero."""
    target: Any = node.target
    *added, a, b = args
    if any([isinstance(n, Size) for n in kwargs.values()]):
        raise refuse(f"{target} of a number that varies")
    rows = max(b.x.ndim - 2, 0)
    given = [g.masked(a, 0, (a.x.ndim - 1,)), g.masked(b, 0, (rows,))]
    return target(*bare(added), *given, **kwargs)


@rule("_trilinear")
def trilinear(g: Graph, node: Node, *args: Any) -> Tensor:
    """A sum of products of three."""
    return node.target(*[g.masked(x, 0) if isinstance(x, Filled) else x for x in args])


@rule("_fft_r2c", "_fft_c2c", "_fft_c2r")
def fft(g: Graph, node: Node, x: Filled, dims: Sequence[int], *args: Any) -> Tensor:
    """A transform of dims without filling."""
    if any([d % x.x.ndim in x.dims for d in dims]) or any([isinstance(n, Size) for n in args]):
        raise refuse(str(node.target))
    return node.target(x.x, dims, *args)


@rule("_cdist_forward", "_cdist_backward")
def cdist(g: Graph, node: Node, *args: Any) -> Tensor:
    """Distances of all pairs, over a last dim without filling; by default not by products, which round more."""
    forward = "forward" in str(node.target)
    a, b = args[:2] if forward else args[1:3]
    if a.x.ndim - 1 in a.dims or b.x.ndim - 1 in b.dims:
        raise refuse(str(node.target))
    parts = [g.masked(x, 0) if isinstance(x, Filled) else x for x in args]
    return node.target(*parts[:3], parts[3] or 2) if forward else node.target(*parts)
