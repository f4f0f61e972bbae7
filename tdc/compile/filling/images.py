"""Rules of filled graphs for images: convolution, pooling, resampling.

Filling of a plane along H and W looks as padding behind it does: 0, or -inf for a maximum.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tdc.compile.filling.run import Graph, bare, rule
from tdc.compile.filling.sums import named
from tdc.compile.filling.values import Filled, Node, Size, refuse
from tdc.ops.images.planes import plane_positions
from tdc.ops.reduce.reduction import finite

BY_EXAMPLE = (
    "im2col", "col2im", "avg_pool1d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
    "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d", "replication_pad2d",
    "replication_pad3d", "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
)  # fmt: skip


@rule("convolution", "convolution_backward")
def convolution(g: Graph, node: Node, *args: Any, **kwargs: Any) -> Any:
    """A convolution: filling is zero, as padding at the end of a plane is."""
    if any([isinstance(x, Size) or (isinstance(x, Filled) and 1 in x.dims) for x in args]):
        raise refuse(str(node.target))
    return node.target(*[g.masked(x, 0) if isinstance(x, Filled) else x for x in args], **bare(kwargs))


def inner(node: Node, x: Filled) -> list[int]:
    """Dims of a plane that are filled, for an operation named after the number of dims of a plane."""
    n = 3 if "3d" in str(node.target) else 2
    return [d for d in x.dims if d >= x.x.ndim - n]


def own_plane(g: Graph, node: Node, x: Filled) -> tuple[list[Tensor], list[int]]:
    """Real sizes of a plane, (1,) each, and those of the bucket."""
    dims = range(x.x.ndim - (3 if "3d" in str(node.target) else 2), x.x.ndim)
    real = [torch.as_tensor(g.count(x, d), device=x.x.device).clamp(min=1).view(1) for d in dims]
    return real, [x.x.shape[d] for d in dims]


@rule("max_pool2d_with_indices", "max_pool3d_with_indices")
def max_pool(g: Graph, node: Node, x: Filled, *how: Any) -> tuple[Tensor, Tensor]:
    """Maxima of windows, and where they are in the real plane."""
    out, index = node.target(g.masked(x, finite(-math.inf, x.x.dtype), inner(node, x)), *how)
    return out, plane_positions(index, *own_plane(g, node, x)) if inner(node, x) else index


@rule("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def max_pool_backward(g: Graph, node: Node, grad: Filled, x: Filled, *how: Any) -> Tensor:
    """Gradients at the maxima."""
    *numbers, index = how
    at = g.masked(index, 0)
    at = plane_positions(at, *own_plane(g, node, x), back=True) if inner(node, x) else at
    return node.target(g.masked(grad, 0), x.x, *numbers, at)


@rule("avg_pool2d", "avg_pool3d", "avg_pool2d_backward", "avg_pool3d_backward")
def avg_pool(g: Graph, node: Node, *args: Any, **kwargs: Any) -> Tensor:
    """Means of windows, or their gradients, where no window counts what is in a plane."""
    given = named(node, args[1:], kwargs)
    fixed = given.get("count_include_pad", True) or not any(given.get("padding", ()))
    known = given.get("divisor_override") is not None or (fixed and not given.get("ceil_mode", False))
    tensors = [x for x in args if isinstance(x, Filled)]
    if not known and any([inner(node, x) for x in tensors]):
        raise refuse(f"{node.target} that counts positions")
    return node.target(g.masked(tensors[0], 0), *bare(args[1:]), **kwargs)


@rule(*[f"grid_sampler_{n}d{end}" for n in (2, 3) for end in ("", "_backward")])
def grid_sample(g: Graph, node: Node, *args: Any, **kwargs: Any) -> Any:
    """Numbers of fixed planes at positions, of which there may be any number."""
    x, grid = args[-6:-4] if "backward" in str(node.target) else args[:2]
    if {*x.dims} - {0} or grid.x.ndim - 1 in grid.dims:
        raise refuse(f"{node.target} of planes whose sides vary")
    return node.target(*[g.masked(a, 0) if isinstance(a, Filled) else a for a in args], **kwargs)


@rule(*BY_EXAMPLE, *[f"{name}_backward" for name in BY_EXAMPLE])
def by_example(g: Graph, node: Node, *args: Any, **kwargs: Any) -> Any:
    """An operation that mixes all dims but the first; gradients of filling are zero."""
    given = [*args, *kwargs.values()]
    inside = any([d != 0 for x in given if isinstance(x, Filled) for d in x.dims])
    if inside or any([isinstance(x, Size) for x in given]):
        raise refuse(str(node.target))
    masked = "backward" in str(node.target)
    parts = [g.masked(x, 0) if masked and isinstance(x, Filled) else bare(x) for x in args]
    return node.target(*parts, **bare(kwargs))
