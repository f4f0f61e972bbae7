"""Rules of filled graphs for operators of our own, on packed tensors with offsets or sizes.

    offsets    filling repeats the last one, so that rows of filling are empty
    lengths    those of filling are 0
    sizes      of planes: -1 says where filling begins, since a plane of size 0 may have a result
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.compile.filling.run import Graph, bare, rule, values_in
from tdc.compile.filling.sums import named
from tdc.compile.filling.values import Filled, Node, Size, refuse

LENGTHS: dict[str, dict[str, int]] = {  # by operator and argument, and what stands in filling
    "rnn": {"lengths": 0}, "rnn_backward": {"lengths": 0},
    "ctc_loss": {"frames": 1, "labels": 0}, "ctc_loss_backward": {"frames": 1, "labels": 0},
}  # fmt: skip


@rule("varlen_attention", "varlen_attention_backward", "cached_attention")
def by_offsets(g: Graph, node: Node, *args: Any, **kwargs: Any) -> Any:
    """Each row for itself, by its offsets."""
    return g.plain(node, args, kwargs)


@rule(*LENGTHS)
def by_lengths(g: Graph, node: Node, *args: Any) -> Any:
    """Each row for itself, by its lengths."""
    given = named(node, args, {}, 0)
    features = [x for x in values_in(args) if isinstance(x, Filled) and x.x.ndim > 1 and x.x.ndim - 1 in x.dims]
    if any([isinstance(x, Size) for x in values_in(args)]) or (features and "rnn" in str(node.target)):
        raise refuse(str(node.target))
    for name, value in LENGTHS[node.target.__name__.split(".")[0]].items():
        given[name] = g.masked(given[name], value)
    return node.target(*[bare(x) for x in given.values()])


@rule("conv_rows", "conv_rows_input", "conv_rows_weight")
def conv_rows(g: Graph, node: Node, *args: Any) -> Tensor:
    """A convolution of packed planes, by their sizes."""
    given = named(node, args, {}, 0)
    fixed = [x for name, x in given.items() if name not in ("sizes", "total")]
    if any([isinstance(x, Size) or (isinstance(x, Filled) and {*x.dims} - {0}) for x in values_in(fixed)]):
        raise refuse(str(node.target))
    sizes = g.masked(given["sizes"], -1)
    given["sizes"] = torch.cat([sizes, sizes.new_full((1, sizes.shape[1]), -1)])
    return node.target(*[x.full if isinstance(x, Size) else bare(x) for x in given.values()])
