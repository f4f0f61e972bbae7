"""Dynamic shapes: which sizes of our types vary from call to call.

For `torch.compile` the containers mark their packed axis, offsets and longest length themselves; `dynamic` marks more,
such as the batch dims of a TensorDict of plain tensors. For `torch.export` the same knowledge is a tree of `Dim`s.
"""

from __future__ import annotations

from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor
from torch.export import Dim

from tdc._rules import Container
from tdc._structure import mark_dynamic
from tdc.masked import MaskedBatch
from tdc.nested import NestedTensor
from tdc.tensordict import TensorDict


def dynamic(x: TensorDict) -> TensorDict:
    """Mark all batch dims of every leaf as varying, so that one graph serves all batch sizes. Returns `x`.

    Example:
        >>> import torch
        >>> dynamic(TensorDict({"x": torch.zeros(3, 2)}, [3])).batch_size
        torch.Size([3])
    """
    for leaf in x._leaves.values():
        for dim in range(x.ndim if isinstance(leaf, Tensor) else 0):
            mark_dynamic(leaf, dim)
    return x


def dynamic_shapes(tree: Any, *, batch_dim: int = 0) -> Any:
    """What varies in a tree of containers and tensors, as `torch.export.export` wants it.

    Ragged and padded axes, batch sizes of containers, and `batch_dim` of plain tensors vary; export finds out which of
    them are equal.

    Args:
        tree: example inputs, such as the tuple of arguments.
        batch_dim: the dim of plain tensors that varies.

    Returns:
        The same tree with `{dim: Dim.AUTO}` for every tensor.

    Example:
        >>> import torch
        >>> dynamic_shapes((torch.zeros(3, 2),)) == ({0: Dim.AUTO},)
        True
    """

    def one(x: Any) -> Any:
        if isinstance(x, NestedTensor):
            s = x.structure
            shapes = [] if s.shapes is None else [{0: Dim.AUTO}]
            extent = [] if s.extent is None else [leading(s.ragged_ndim)]
            return [{s.packed_dim: Dim.AUTO}, {0: Dim.AUTO}, *shapes, *extent]
        if isinstance(x, MaskedBatch):
            return [dict.fromkeys((x.batch_dim, *x.ragged_dims), Dim.AUTO), {0: Dim.AUTO}]
        if isinstance(x, TensorDict):
            return [leading(x.ndim) if isinstance(leaf, Tensor) else one(leaf) for _, leaf in sorted(x._leaves.items())]
        return {batch_dim: Dim.AUTO} if isinstance(x, Tensor) and x.ndim > batch_dim else None

    return pytree.tree_map(one, tree, is_leaf=lambda x: isinstance(x, Container))


def leading(count: int) -> dict[int, Any]:
    """The first dims, as varying."""
    return dict.fromkeys(range(count), Dim.AUTO)
