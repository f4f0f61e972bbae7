"""The choice of the backend of attention within rows.

    rows       CPU: a fused SDPA for each example
    weights    CPU with dropout, a mask that requires grad or values of another size than keys: weights by example
    flash      CUDA, half precision: torch's flash kernel for packed rows
    efficient  CUDA, what flash lacks (single precision, head sizes, causal rows of other lengths): torch's
               memory-efficient kernel
    flex       CUDA, a mask or a function of scores in a graph: flex_attention with a mask of documents
    padded     everything else, such as functions of scores on CPU and forward mode: SDPA of a rectangle, or of a few

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
    """The facts of a call that choose its backend.

    Args:
        device: its type.
        sizes: head sizes of queries and of values.
        same_rows: queries and keys share one structure.
        learns: the mask requires grad.
        flash_head: the largest head size of the device's flash kernel.
        efficient: the device has the memory-efficient kernel for the dtype.
        fuses: traced into a graph, under no transform of `torch.func`, with more than zero queries and keys.
        windowed: queries see near keys alone; only "flash" takes that without a mask.
        moves: there are forward-mode tangents, which operators of packed rows do not take.
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
    """The backend of a call."""
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
