"""The choice of what runs attention within rows.

    backend    runs on                  what it is                                     where
    rows       CPU                      a fused SDPA for each example                  `cpu`, in the operator
    weights    CPU, dropout, a mask that learns, values   the weights of each example      `weights`, in the operator
               of another size than keys
    flash      CUDA, half precision     torch's flash kernel for packed rows           `flash`, in the operator
    efficient  CUDA, what flash has not: single precision, head sizes, causal rows of     `efficient`, in the
               other lengths            torch's memory-efficient kernel                operator
    flex       CUDA, a mask or a function of scores inside a graph: flex_attention with   `flex`, in the graph
               a mask of documents
    padded     everything, a function of scores on CPU, derivatives in a direction: SDPA   `padded`, `near`, in the
               of a rectangle, or of a few                                                 graph

Invariants: all backends give the same numbers; the choice reads metadata, and neither times nor data.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from tdc.core.dtypes import HALF
from tdc.core.torch_functions import fused_cpu_backward, fused_cpu_forward
from tdc.kernels.attention import flash

FLEX_HEADS = range(16, 257)  # head sizes of flex_attention's kernels


class Call(NamedTuple):
    """What the choice of a backend depends on.

    Args:
        device: its type.
        sizes: head sizes of queries and of values.
        causal: the i-th query attends to keys up to the i-th.
        same_rows: queries and keys share one structure.
        masked: there is a mask.
        learns: the mask wants a gradient.
        score_mod: there is a function of scores.
        dropout: of attention weights.
        flash_head: the largest head size of the device's flash kernel.
        efficient: the device has the memory-efficient kernel for the dtype.
        windowed: queries see keys near to them alone, which backends but "flash" have as a mask.
        fuses: traced into a graph, under no transform of `torch.func`, with more than zero queries and keys.
        moves: a derivative in a direction is taken, which operators of packed rows have not.
    """

    device: str
    dtype: torch.dtype
    sizes: tuple[int, int]
    causal: bool = False
    same_rows: bool = True
    masked: bool = False
    learns: bool = False
    score_mod: bool = False
    dropout: bool = False
    flash_head: int = 0
    efficient: bool = False
    fuses: bool = False
    windowed: bool = False
    moves: bool = False


def backend(c: Call) -> Literal["rows", "weights", "flash", "efficient", "flex", "padded"]:
    """What runs a call."""
    size, value_size = c.sizes
    if c.moves:
        return "padded"
    if c.device == "cpu":
        if c.score_mod:
            return "padded"
        plain = c.dropout or c.learns or size != value_size or fused_cpu_forward is None or fused_cpu_backward is None
        return "weights" if plain else "rows"
    if c.device != "cuda" or c.dtype not in (*HALF, torch.float32):
        return "padded"
    if c.masked or c.score_mod:
        return "flex" if c.fuses and not c.dropout and size in FLEX_HEADS and value_size in FLEX_HEADS else "padded"
    fits = size == value_size <= c.flash_head and size % flash.ALIGNED == 0
    # The kernel aligns masks with the ends of rows: the same as with their beginnings where lengths are equal.
    if c.dtype in HALF and fits and (c.same_rows or not (c.causal or c.windowed)):
        return "flash"
    return "efficient" if c.efficient else "padded"
