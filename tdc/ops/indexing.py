"""Looking up and writing at positions: index_select, embedding, and `td.at[index]`.

`td.at[index].set(value)` returns a new TensorDict, as in JAX: the source is not changed. The index is resolved once,
to flat positions of the batch; each leaf then needs one `index_copy` or `index_add`.

Invariants: an entry without a leaf is an error; duplicates accumulate in `add`, and which one wins in `set` is
undefined, as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import normal_dim
from tdc.core.errors import DtypeError, ShapeError, UnsupportedError, describe, message, show_sizes
from tdc.core.frozen import Frozen
from tdc.core.keys import join, missing_key, show, unravel_key
from tdc.core.rules import Rule, add_rule
from tdc.core.typing import KeyPath, Op
from tdc.ops.at import places_at
from tdc.ops.batch import lift
from tdc.ragged.index_forms import FULL
from tdc.ragged.index_nested import index_rows
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.tensordict.indexing import picker
from tdc.tensordict.tensordict import TensorDict, index, make


def flat_index(index: Any) -> Tensor:
    """The index of `index_select`, one dim.

    Raises:
        DtypeError: it is no tensor.
    """
    if not isinstance(index, Tensor):
        hint = "torch.tensor([0, 2]), or x[[0, 2]]"
        raise DtypeError(message("index_select", "an index tensor", describe(index), hint=hint))
    return index.reshape(-1)


def index_select_nested(x: NestedTensor, dim: int, index: Tensor) -> Any:
    """Rows, static places, or places that every row has: then the result is dense."""
    axis, flat = x.structure.axis(dim, x.ndim, "index_select"), flat_index(index)
    if axis is None:
        return index_rows(x, flat)
    if axis == x.structure.packed_dim:
        return x[(FULL,) * normal_dim(dim, x.ndim, "index_select") + (flat,)]
    return x.with_values(x.values.index_select(axis, flat))


def index_select_masked(x: MaskedBatch, dim: int, index: Tensor) -> Any:
    return x[(FULL,) * normal_dim(dim, x.ndim, "index_select") + (flat_index(index),)]


def index_select_tensordict(x: TensorDict, dim: int, index: Tensor) -> TensorDict:
    d, of = normal_dim(dim, x.ndim, "index_select"), picker(flat_index(index))
    return lift(x, lambda v: v.index_select(d, index) if d or isinstance(v, Tensor) else of(v), op="index_select")


def embedding_nested(input: NestedTensor, weight: Tensor, *args: Any, **kwargs: Any) -> NestedTensor:
    """Rows of a table: (B, *S0, -1, *S1) -> (B, *S0, -1, *S1, D)."""
    return input.with_values(F.embedding(input.values, weight, *args, **kwargs))


def embedding_masked(input: MaskedBatch, weight: Tensor, *args: Any, **kwargs: Any) -> MaskedBatch:
    """Padding looks up row 0 and is cut off, so that no row of the table gets a gradient from it."""
    out = F.embedding(input.filled(0), weight, *args, **kwargs)
    return input.with_data(out.masked_fill(~input.mask.unsqueeze(-1), 0))


class At(Frozen):
    """`td.at[index]`: what to do at some examples of a TensorDict. Each method returns a new TensorDict.

    `mode` says what becomes of indices out of range: None raises, "drop" writes nothing there, "clip" takes the nearest
    place. Negative indices count from the end.

    Compile:
        fullgraph; with a mode nothing is read on the host.

    Example:
        >>> td = TensorDict({"x": torch.zeros(3)}, [3])
        >>> td.at[1].set(5)["x"], td.at[[0, 0]].add(1.0)["x"]
        (tensor([0., 5., 0.]), tensor([2., 0., 0.]))
        >>> td.at[torch.tensor([2, 3])].set(5, mode="drop")["x"]
        tensor([0., 0., 5.])
    """

    __slots__ = ("_index", "_td")
    _instead = "td = td.at[index].set(value)"
    _td: TensorDict
    _index: Any

    def __init__(self, td: TensorDict, idx: Any = None) -> None:
        self._td = td
        self._index = idx

    def __getitem__(self, idx: Any) -> At:
        return At(self._td, idx)

    def get(self) -> TensorDict:
        """The examples at the index."""
        return index(self._td, self._index)

    def set(self, value: Any, *, mode: str | None = None) -> TensorDict:
        """With `value` there: a TensorDict or mapping (other keys stay), a tensor over batch dims, or a number."""
        return write(self, "set", value, mode, lambda x, i, v: x.index_copy(0, i, v))

    def add(self, value: Any, *, mode: str | None = None) -> TensorDict:
        """With `value` added there; duplicates of the index accumulate."""
        return write(self, "add", value, mode, lambda x, i, v: x.index_add(0, i, v))

    def mul(self, value: Any, *, mode: str | None = None) -> TensorDict:
        """Multiplied by `value` there."""
        return write(self, "mul", value, mode, lambda x, i, v: reduced(x, i, v, "prod"))

    def min(self, value: Any, *, mode: str | None = None) -> TensorDict:
        """The smaller of what is there and `value`."""
        return write(self, "min", value, mode, lambda x, i, v: reduced(x, i, v, "amin"))

    def max(self, value: Any, *, mode: str | None = None) -> TensorDict:
        """The larger of what is there and `value`."""
        return write(self, "max", value, mode, lambda x, i, v: reduced(x, i, v, "amax"))

    def apply(self, fn: Callable[[Any], Any], *, mode: str | None = None) -> TensorDict:
        """With `fn` of what is there."""
        if mode is None:
            return self.set(self.get().apply(fn))
        places = places_at(self._td, self._index, "clip", "at.apply")
        found = index(self._td.reshape(-1), places)
        return self.set(found.apply(fn), mode=mode)


def at_of(td: TensorDict) -> At:
    """`td.at`. Dynamo (torch 2.11-2.13) calls no class where a property of an object made in the graph has one."""
    return At(td)


def write(at: At, op: str, value: Any, mode: str | None, put: Callable[[Tensor, Tensor, Tensor], Tensor]) -> TensorDict:
    """Put values at flat positions of every leaf that `value` speaks of."""
    td, size = at._td, at._td.batch_size
    where, total = places_at(td, at._index, mode, f"at.{op}"), math.prod(size)
    flat, leaves = where.reshape(-1), dict(td._leaves)
    for path, given in values_at(value, td, op).items():
        leaf = leaves[path]
        if not isinstance(leaf, Tensor):
            hint = f"td.set({show(path)!r}, value) for all of it, value made anew"
            if isinstance(leaf, (NestedTensor, MaskedBatch)):
                hint = "write into a padded leaf (to_padded), or rebuild it with tdc.pack"
            raise UnsupportedError(message(f"at.{op}", "tensor leaves", "another", {show(path): describe(leaf)}, hint))
        features = leaf.shape[len(size) :]
        v = as_value(given, leaf, path, op)
        wide = v.view(*v.shape, *[1] * len(features)) if given is value and v.ndim > 0 else v
        try:
            wide = wide.expand([*where.shape, *features]).reshape(len(flat), *features)
        except RuntimeError:
            expected = f"a value that broadcasts to {show_sizes([*where.shape, *features])}"
            hint = "a tensor spans batch dims; for features give {key: value}"
            raise ShapeError(message(f"at.{op}", expected, describe(v), {show(path): describe(leaf)}, hint)) from None
        rows = leaf.reshape(total, *features)
        if mode == "drop":  # what is dropped goes to a row of its own
            rows = torch.cat([rows, rows.new_zeros(1, *features)])
        done = put(rows, flat.to(leaf.device), wide)
        leaves[path] = (done[:total] if mode == "drop" else done).view(leaf.shape)
    return make(leaves, td._nodes, size, td.device)


def values_at(value: Any, td: TensorDict, op: str) -> dict[KeyPath, Any]:
    """What to write into which leaf: the entries of a TensorDict or mapping, or one value for all leaves.

    Raises:
        KeyPathError: an entry without a leaf.
    """
    if not isinstance(value, (TensorDict, Mapping)):
        return dict.fromkeys(td._leaves, value)
    given = entries(value)
    for path in given:
        if path not in td._leaves:
            raise missing_key(f"at.{op}", path, td._leaves)
    return given


def entries(source: Any) -> dict[KeyPath, Any]:
    """Values of nested mappings by path."""
    if isinstance(source, TensorDict):
        return source._leaves
    if not isinstance(source, Mapping):
        return {(): source}
    return {join(unravel_key(key), path): v for key, inner in source.items() for path, v in entries(inner).items()}


def as_value(value: Any, leaf: Tensor, path: KeyPath, op: str) -> Tensor:
    """A value in the dtype of its leaf; `set` converts as torch does, arithmetic does not drop fractions.

    Raises:
        DtypeError: it cannot become a tensor, or is of a kind of number that the leaf cannot hold.
    """
    try:
        v = torch.as_tensor(value, device=leaf.device)
    except (TypeError, ValueError, RuntimeError):
        where, hint = {show(path): describe(leaf)}, "torch.as_tensor(value)"
        raise DtypeError(message(f"at.{op}", "tensors or numbers", describe(value), where, hint)) from None
    if op != "set" and number_kind(v.dtype) > number_kind(leaf.dtype):
        where, hint = {show(path): describe(leaf)}, "convert the leaf first: td.set(key, leaf.float())"
        raise DtypeError(message(f"at.{op}", f"a value that fits {leaf.dtype}", describe(v), where, hint))
    return v.to(leaf.dtype)


def number_kind(dtype: torch.dtype) -> int:
    """Bool, integer, real or complex, in the order in which `torch.can_cast` allows; Dynamo cannot trace that."""
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype == torch.bool else 1


def reduced(x: Tensor, i: Tensor, v: Tensor, reduce: str) -> Tensor:
    """`x.scatter_reduce` of whole examples."""
    return x.scatter_reduce(0, i.view(-1, *[1] * (x.ndim - 1)).expand_as(v), v, reduce)


def index_rule(op: Op, **impls: Op) -> None:
    """Rows for an indexing operation."""
    for kind, impl in impls.items():
        add_rule(Rule(op, kind, "indexing", impl, op))


index_rule(
    torch.index_select, nested=index_select_nested, masked=index_select_masked, tensordict=index_select_tensordict
)
index_rule(F.embedding, nested=embedding_nested, masked=embedding_masked)
TensorDict.at = property(at_of)  # type: ignore[attr-defined]  # fields and access live below; what writes is an operation
