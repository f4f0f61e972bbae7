"""share_memory, pin_memory: a TensorDict with all tensors in one storage, of shared or of page-locked memory.

Transfers between processes and devices cost by the storage, so the tensors of all leaves, their offsets and lengths
included, go into one.

Invariants: tensors that are there already stay; one tensor of several leaves stays one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect
from tdc.core.errors import UnsupportedError, describe, message, refuse_wrong
from tdc.core.keys import show
from tdc.core.one_storage import copies, is_plain, shared_buffer
from tdc.layout.structure import Structure
from tdc.ragged.masked import MaskedBatch, build_masked
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.tensordict.leaf import unwrap
from tdc.tensordict.methods import register
from tdc.tensordict.shared import like as like_leaf
from tdc.tensordict.tensordict import TensorDict, build_td

Replaced = dict[int, Tensor]  # by the identity of the old tensor


def share_memory(td: TensorDict) -> TensorDict:
    """`td.share_memory()`."""
    expect("share_memory", td, TensorDict)
    return in_one_buffer("share_memory", td, lambda x: not x.is_shared(), shared_buffer, other_shared)


def pin_memory(td: TensorDict) -> TensorDict:
    """`td.pin_memory()`."""
    expect("pin_memory", td, TensorDict)
    if not torch.accelerator.is_available():
        got, hint = "none that torch finds", "leave it out, or td.share_memory() for other processes"
        raise UnsupportedError(message("pin_memory", "an accelerator to lock memory for", got, hint=hint))

    def wanted(x: Tensor) -> bool:
        return not x.requires_grad and not x.is_pinned()

    buffer = partial(torch.empty, dtype=torch.uint8, device="cpu", pin_memory=True)
    return in_one_buffer("pin_memory", td, wanted, buffer, lambda x: x.pin_memory() if x.device.type == "cpu" else x)


def other_shared(x: Tensor) -> Tensor:
    """A tensor that is more than its elements in shared memory."""
    if x.is_shared():
        return x
    copy: Any = x.detach().clone()
    return copy.share_memory_().requires_grad_(x.requires_grad)


def in_one_buffer(
    op: str, td: TensorDict, wanted: Callable[[Tensor], bool], buffer: Callable[[int], Tensor],
    other: Callable[[Tensor], Tensor],
) -> TensorDict:  # fmt: skip
    """A TensorDict with wanted plain tensors in one buffer; `other` copies each that is more than its elements."""
    found: dict[int, Tensor] = {}
    paths: dict[int, str] = {}
    for path, leaf in td._leaves.items():
        found |= {id(x): x for x in tensors_of(leaf)}
        paths |= {id(x): show(path) for x in tensors_of(leaf)}
    plain = [x for x in found.values() if is_plain(x) and wanted(x)]
    new = {id(x): like(own, x) for x, own in zip(plain, copies(plain, buffer), strict=True)}
    wrong: dict[str, str] = {}
    for i, x in found.items():
        if i not in new:
            try:
                new[i] = x if is_plain(x) else other(x)
            except (RuntimeError, NotImplementedError):
                wrong[paths[i]] = f"{describe(x)} on {x.device}, {x.layout}"
    hint = "td.exclude(key), or x.to_dense()"
    refuse_wrong(UnsupportedError, op, "dense tensors with content", wrong, "others", hint)
    if all([new[i] is x for i, x in found.items()]):
        return td
    structures: dict[int, Structure] = {}
    return build_td({p: replaced(x, new, structures) for p, x in td._leaves.items()}, td._nodes, td._size, td._device)


def like(copy: Tensor, x: Tensor) -> Tensor:
    """A copy that requires a gradient where the tensor did."""
    if copy.requires_grad == x.requires_grad:
        return copy
    return copy.detach().requires_grad_(x.requires_grad)


def tensors_of(leaf: Any) -> list[Tensor]:
    """The tensors that a leaf is made of."""
    if isinstance(leaf, NestedTensor):
        s = leaf.structure
        return [leaf.values, s.offsets, *([] if s.shapes is None else [s.shapes])]
    leaf = unwrap(leaf)
    return [leaf.data, leaf.lengths] if isinstance(leaf, MaskedBatch) else [leaf] if isinstance(leaf, Tensor) else []


def replaced(leaf: Any, new: Replaced, structures: dict[int, Structure]) -> Any:
    """A leaf of other tensors; those that share a structure go on doing so."""
    if isinstance(leaf, MaskedBatch):
        data, lengths = new[id(leaf.data)], new[id(leaf.lengths)]
        return build_masked(data, lengths, leaf.ragged_dims, leaf.batch_dim, new_lengths=True)
    if not isinstance(leaf, NestedTensor):
        return like_leaf(leaf, new[id(unwrap(leaf))]) if isinstance(unwrap(leaf), Tensor) else leaf
    s = leaf.structure
    if id(s) not in structures:
        shapes = None if s.shapes is None else new[id(s.shapes)]
        structure = Structure(new[id(s.offsets)], shapes, s.extent, s.packed_dim, s.batch_dim, s.ragged_ndim)
        structures[id(s)] = structure.marked()
    return build_nested(structures[id(s)], new[id(leaf.values)])


register("share_memory", share_memory)
register("pin_memory", pin_memory)
