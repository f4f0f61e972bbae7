"""Rotary embeddings whose frequencies follow the length of a call, computed for each row of a packed batch.

    rope_type "longrope"    one set of frequencies up to the original context, another beyond it
    rope_type "dynamic"     frequencies of the length, beyond the original context

transformers takes the largest position of the call as its length, so the longest row would set the frequencies of all.
A hook behind the rotary module computes its results again while a batch is packed.

Invariant: calls that are not packed are as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.core.pytree import tree_map
from tdc.layout.segments import lengths_on_host, row_ids
from tdc.layout.structure import Structure

Embed = Callable[[Tensor], Any]  # of positions, as a rotary module gives it: cosines and sines, or complex numbers

class Context(NamedTuple):
    """Positions up to which all rows have the same frequencies, and the rope_type beyond."""

    kind: str
    length: int


def context_of(module: Any, layer_type: str | None = None) -> Context | None:
    """The original context of a rotary module, or of one type of layers; None where frequencies are constant."""
    kinds = getattr(module, "rope_type", None)
    kind = kinds.get(layer_type) if isinstance(kinds, dict) else kinds
    if kind == "longrope":
        parameters = module.config.rope_parameters
        parameters = parameters if layer_type is None else parameters[layer_type]
        return Context(kind, parameters["original_max_position_embeddings"])
    if isinstance(kind, str) and "dynamic" in kind:
        return Context("dynamic", module.original_max_seq_len)
    return None


def contexts_of(model: Any) -> list[int]:
    """Lengths of the original contexts of a model whose frequencies follow the length; none for most models."""
    return [context.length for module in model.modules() for context in contexts_in(module)]


def contexts_in(module: Any) -> list[Context]:
    """Frequencies of a rotary module, one for each type of its layers; none of another module."""
    kinds = getattr(module, "rope_type", None)
    found = [context_of(module, name) for name in (kinds if isinstance(kinds, dict) else (None,))]
    return [context for context in found if context is not None]


def embedded_by_row(
    rows: Structure, module: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None
) -> Any:
    """Results (1, N, D) for positions (1, N), each row at its own frequencies; None where all have the same."""
    context = context_of(module, layer_type)
    if context is None:
        return None
    options = {} if layer_type is None else {"layer_type": layer_type}

    def embed(positions: Tensor) -> Any:
        return module.forward(x, positions, **options)

    return (long if context.kind == "longrope" else dynamic)(rows, embed, position_ids, context.length)


def long(rows: Structure, embed: Embed, positions: Tensor, length: int) -> Any:
    """Both sets of frequencies for all positions, of which each row takes one; nothing is read on the host."""
    ids = row_ids(rows, positions.shape[1])
    beyond = (positions[0] >= length).long()
    far = (beyond.new_zeros(rows.offsets.shape[0]).index_add(0, ids, beyond) > 0)[ids][None]
    last = positions.new_full((1, 1), length)  # one position beyond the context, for the other set
    near, distant = embed(positions.masked_fill(far, 0)), embed(torch.cat([positions, last], 1))
    return tree_map(lambda a, b: torch.where(far[..., None], b[:, :-1], a), near, distant)


def dynamic(rows: Structure, embed: Embed, positions: Tensor, length: int) -> Any:
    """One call for each row; the module remembers the longest, and forgets it at a short one."""
    if not positions.numel() or int(positions.amax()) < length:
        return None
    first, found = positions.new_zeros((1, 1)), []
    for row in positions.split(lengths_on_host(rows), 1):
        if row.shape[1]:
            embed(first)
            found.append(embed(row))
    return tree_map(lambda *parts: torch.cat(parts, 1), *found)
