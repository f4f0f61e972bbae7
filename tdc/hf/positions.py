"""Positions that a model counts itself, anew in each row of a packed batch.

    tables of positions   BART and its kin count 0, 1, … N along the packed sequence; they are given positions of rows
    tables of tokens      M2M100 and its kin count tokens that are no padding; they see rows padded, and what they say
                          is packed
    biases of distances   T5 and its kin make (1, H, N, N) of it; they make (1, H, L, M) of the longest rows, of which
                          each row reads its corner
    rotary embeddings     frequencies that follow the length of a call are those of each row

All are hooks of torch around the forward of a module, which do something only while the batch is packed. A table does
not see the batch, so `counted` says which rows there are, to the thread that calls.

Of rotary embeddings there are two kinds whose frequencies follow the length. transformers takes the largest position of
the call for it, so the longest row would set the frequencies of all; they are computed again behind the module.

    rope_type "longrope"    one set of frequencies up to the original context, another beyond it
    rope_type "dynamic"     frequencies of the length, beyond the original context

Invariant: calls that are not packed are as they were.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tdc.core.annotations import python_signature
from tdc.core.pytree import tree_map
from tdc.hf.attention import Packed
from tdc.layout.padding import pack_rows, pad_rows
from tdc.layout.segments import lengths_on_host, local_positions, longest, row_ids
from tdc.layout.structure import Structure

HOOKED = "tdc_hooked"  # the attribute by which a module is known again
OF_TOKENS = {"input_ids", "inputs_embeds", "cache_length"}  # the arguments of a table of tokens
Embed = Callable[[Tensor], Any]  # of positions, as a rotary module gives it: cosines and sines, or complex numbers


class Side(NamedTuple):
    """The rows of the sources or of the targets, of so many positions."""

    rows: Structure
    total: int

    @property
    def positions(self) -> Tensor:
        """Of each in its row, (N,)."""
        return local_positions(self.rows, self.total)


class Counted(threading.local):
    """The packed rows that this thread has called a model with, and those in which tables count positions."""

    rows: Structure | None = None
    side: Side | None = None


current = Counted()


@contextmanager
def counted(side: Side, given: bool) -> Iterator[None]:
    """Rows in which positions are counted until the context ends; tables count none where positions are given."""
    current.rows = side.rows
    current.side = None if given else side
    try:
        yield
    finally:
        current.rows = None
        current.side = None


def hook_positions(model: nn.Module) -> list[Callable[[], None]]:
    """Hook all modules of a model that count positions, if they are not hooked already; functions that undo it."""
    undo: list[Callable[[], None]] = []
    for module in [m for m in model.modules() if not hasattr(m, HOOKED)]:
        handles = hook(module)
        if handles:
            setattr(module, HOOKED, True)
            undo += [*[handle.remove for handle in handles], partial(delattr, module, HOOKED)]
    return undo


def hook(module: nn.Module) -> list[Any]:
    """Hook a module by the arguments of its forward; the handles, none for most modules."""
    asked = set(python_signature(module.forward).parameters)
    if isinstance(module, nn.Embedding) and "position_ids" in asked:
        return [module.register_forward_pre_hook(count_in_rows, with_kwargs=True)]
    if hasattr(module, "create_position_ids_from_input_ids") and asked == OF_TOKENS:
        return [module.register_forward_pre_hook(see_padded), module.register_forward_hook(give_packed)]
    if hasattr(module, "compute_bias") and {"mask", "position_bias"} <= asked:
        return [module.register_forward_pre_hook(bias_in_rows, with_kwargs=True)]
    if contexts_in(module):
        return [module.register_forward_hook(turn_in_rows, with_kwargs=True)]
    return []


def count_in_rows(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A table of positions, called with those of the rows."""
    return None if current.side is None else (args, {**kwargs, "position_ids": current.side.positions})


def turn_in_rows(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """A rotary module, called once more for the frequencies of each row."""
    return None if current.rows is None else embedded_by_row(current.rows, module, *args, **kwargs)


def see_padded(module: Any, args: tuple[Any, ...]) -> Any:
    """A table of tokens (1, N), or of the sizes of vectors (1, N, D), called with rows (B, L, ...)."""
    if current.side is None:
        return None
    rows, (tokens, vectors, *rest) = current.side.rows, args
    if tokens is None:
        return None, pad_rows(vectors[0, :, :1].detach(), rows, longest(rows)), *rest
    return pad_rows(tokens[0], rows, longest(rows), module.padding_idx), None, *rest


def give_packed(module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
    """A table of rows (B, L, D), packed (1, N, D)."""
    return None if current.side is None else pack_rows(output, *current.side)[None]


def bias_in_rows(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Attention with a bias of distances, called with that of the longest rows; a number where it has none."""
    rows = kwargs.get("mask")
    if not isinstance(rows, Packed) or kwargs.get("position_bias") is not None:
        return None
    bias = args[0].new_zeros(())
    if module.has_relative_attention_bias:
        bias = module.compute_bias(longest(rows.queries)[0], longest(rows.keys)[0], device=args[0].device)
    return args, {**kwargs, "position_bias": bias}


# -- rotary embeddings


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
