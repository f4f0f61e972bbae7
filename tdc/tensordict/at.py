"""`td.at[index]`: a TensorDict with other values at some examples, as `x.at[index]` of JAX.

    td.at[index].set(value)                 an index out of range is an error, as in torch
    td.at[index].set(value, mode="drop")    nothing is written for it
    td.at[index].set(value, mode="clip")    it means the first or the last position along the dim

The index is resolved once, to flat positions of the batch. Each leaf then needs one `index_copy` or `index_add`.

Invariants:
  - an entry without a leaf is an error; duplicates accumulate in `add`, and which one wins in `set` is undefined, as
    in torch;
  - batch dims of a value broadcast to the indexed batch, features to the features of a leaf, never one to the other;
  - with a mode nothing is read on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import GAP, NEW_DIM, as_data, entries_of
from tdc.core.dynamo import known
from tdc.core.errors import (
    DtypeError,
    IndexingError,
    ShapeError,
    UnsupportedError,
    describe,
    describe_index,
    message,
    show_sizes,
)
from tdc.core.frozen import Frozen
from tdc.core.keys import as_path, missing_key, show
from tdc.core.typing import KeyPath, OpName
from tdc.tensordict.indexing import Numbers
from tdc.tensordict.leaf import Leaf, unwrap, wrap_leaf
from tdc.tensordict.methods import register
from tdc.tensordict.nodes import extra_of
from tdc.tensordict.paths import join
from tdc.tensordict.shared import Shared, check_pair
from tdc.tensordict.tensordict import TensorDict, build_td, index, normal_index


class At(Frozen):
    """`td.at[index]`: what to do at some examples of a TensorDict. Each method returns a new TensorDict.

    `mode` says what becomes of indices out of range: None raises, "drop" writes nothing there, "clip" takes the nearest
    position. Negative indices count from the end.

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
    _title = "at"
    _instead = "td = td.at[index].set(value)"
    _td: TensorDict
    _index: Any

    def __init__(self, td: TensorDict, idx: Any = None) -> None:
        self._td = td
        self._index = idx

    def __repr__(self) -> str:
        index = "" if self._index is None else f"[{describe_index(self._index)}]"
        return f"at{index} of {describe(self._td)}"

    def __getitem__(self, idx: Any) -> At:
        return At(self._td, idx)

    def get(self) -> TensorDict:
        """The examples at the index."""
        return index(self._td, self._index)

    def set(self, value: Any, *, mode: str | None = None) -> TensorDict:
        """With `value` there: a TensorDict or mapping (other keys stay), a tensor over batch dims, or a number.

        Batch dims of a TensorDict or a tensor broadcast to `td[index].batch_size`, features to those of each leaf. In a
        mapping `{key: tensor}` a tensor broadcasts to both together, as in `x[index] = tensor`.

        Raises:
            ShapeError: a value that does not broadcast.
        """
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
        positions = positions_at(self._td, self._index, "clip", "at.apply")
        found = index(TensorDict.reshape(self._td, -1), positions)
        return self.set(found.apply(fn), mode=mode)


def write(at: At, op: str, value: Any, mode: str | None, put: Callable[[Tensor, Tensor, Tensor], Tensor]) -> TensorDict:
    """Put values at flat positions of every leaf that `value` has an entry for."""
    td, size = at._td, at._td._size
    where, total = positions_at(td, at._index, mode, f"at.{op}"), math.prod(size)
    flat, leaves = where.reshape(-1), dict(td._leaves)
    for path, (given, span) in values_at(value, td, op).items():
        leaf = leaves[path]
        if type(leaf) is Leaf and op == "set":
            leaves[path] = with_rows(leaf, path, given, where.cpu(), size)
            continue
        if type(leaf) is Shared or type(given) is Shared:
            if span is not None:
                check_pair(f"at.{op}", leaf, given)
            continue
        if not isinstance(leaf, Tensor):
            hint = "td.exclude(key) first, or td.at[index].set({key: value})"
            if type(leaf) is not Leaf:  # a ragged one
                hint = "write into a padded leaf (to_padded), or rebuild it with tdc.pack"
            raise UnsupportedError(message(f"at.{op}", "tensor leaves", "another", {show(path): describe(leaf)}, hint))
        features = leaf.shape[len(size) :]
        v = as_value(given, leaf, path, op)
        wide, shape = with_features(v, span, len(features)), [*where.shape, *features]
        if wide is None or not broadcasts(wide.shape, shape):
            raise too_wide(f"at.{op}", shape, v, path, leaf)
        wide = wide.expand(shape).reshape(len(flat), *features)
        examples = leaf.reshape(total, *features)
        if mode == "drop":  # what is dropped is written to one more example
            examples = torch.cat([examples, examples.new_zeros(1, *features)])
        done = put(examples, flat.to(leaf.device), wide)
        leaves[path] = (done[:total] if mode == "drop" else done).view(leaf.shape)
    return build_td(leaves, td._nodes, size, td._device)


def too_wide(op: OpName, size: list[int], value: Any, path: KeyPath, leaf: Any) -> ShapeError:
    """The error for a value that does not fit where it is to be written."""
    hint = "a tensor or TensorDict spans batch dims; for features give {key: value}"
    expected = f"a value that broadcasts to {show_sizes(size)}"
    return ShapeError(message(op, expected, describe(value), {show(path): describe(leaf)}, hint))


def with_rows(leaf: Leaf, path: KeyPath, given: Any, where: Tensor, size: torch.Size) -> Any:
    """A leaf of another library's class with other examples at flat positions: both joined, then indexed."""
    held: Any = unwrap(leaf)
    value, total = wrap_leaf(given), math.prod(size)
    if type(unwrap(value)) is not type(held):
        got, hint = describe(value), "ObjectArray([x], ()) for one object, ObjectArray(list) for one per example"
        expected = f"an instance of {type(held).__name__}"
        raise DtypeError(message("at.set", expected, got, {show(path): describe(leaf)}, hint))
    features = leaf.shape[len(size) :]
    dims = value.ndim - len(features)
    try:
        source = torch.arange(math.prod(value.shape[:dims])).view(value.shape[:dims]).expand(where.shape)
    except RuntimeError:
        raise too_wide("at.set", [*where.shape, *features], value, path, leaf) from None
    if value.shape[dims:] != features:
        raise too_wide("at.set", [*where.shape, *features], value, path, leaf)
    kept = where < total  # no graph holds such a leaf, so that a size may depend on what is dropped
    rows = torch.arange(total)
    rows[where[kept]] = source[kept] + total
    parts: list[Any] = [one_dim(leaf, len(size)), one_dim(value, dims)]
    joined = torch.cat(parts, 0)
    return joined[rows] if len(size) == 1 else joined[rows].reshape(leaf.shape)


def one_dim(x: Leaf, dims: int) -> Leaf:
    """A leaf with one batch dim in place of several or none."""
    return x if dims == 1 else x.reshape((math.prod(x.shape[:dims]), *x.shape[dims:]))


def values_at(value: Any, td: TensorDict, op: str) -> dict[KeyPath, tuple[Any, int | None]]:
    """Return the value for each leaf, and how many batch dims it spans.

    None stands for all of its dims, 0 for a value that broadcasts as a whole.
    """
    if not isinstance(value, (TensorDict, Mapping)):
        return dict.fromkeys(td._leaves, (value, None))
    given = entries_in(value, td, ())
    for path in given:
        if path not in td._leaves:
            raise missing_key(f"at.{op}", path, td._leaves)
    return given


def entries_in(source: Any, td: TensorDict, at: KeyPath) -> dict[KeyPath, tuple[Any, int | None]]:
    """Values of nested mappings by path. Those of a TensorDict span its batch dims, but for dims that its node in `td`
    has beyond those of `td`."""
    entries: Any = source
    if isinstance(source, TensorDict):
        span = max(len(source._size) - extra_of(td._nodes.get(at, 0)), 0)
        return {join(at, path): (x, span) for path, x in source._leaves.items()}
    if not isinstance(source, Mapping):
        return {at: (source, 0)}
    found: dict[KeyPath, tuple[Any, int | None]] = {}
    for key, inner in entries.items():
        found.update(entries_in(inner, td, join(at, as_path(key, "at"))))
    return found


def with_features(v: Tensor, span: int | None, features: int) -> Tensor | None:
    """A value with dims of size 1 behind its batch dims, for as many features as a leaf has; None if it has more."""
    span = v.ndim if span is None else span
    if not span:
        return v
    own = v.ndim - span
    return None if own > features else v.view(*v.shape[:span], *[1] * (features - own), *v.shape[span:])


def broadcasts(sizes: Sequence[int], shape: Sequence[int]) -> bool:
    """False if a tensor of these sizes is known not to broadcast to a shape."""
    pairs = zip(reversed(sizes), reversed(shape), strict=False)
    return len(sizes) <= len(shape) and not any([known(a != b) and known(a != 1) for a, b in pairs])


def as_value(value: Any, leaf: Tensor, path: KeyPath, op: str) -> Tensor:
    """A value in the dtype of its leaf; `set` converts as torch does, arithmetic does not drop fractions."""
    try:
        v = as_data(value, leaf.device)
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


def positions_at(td: TensorDict, idx: Any, mode: str | None, op: OpName) -> Tensor:
    """The flat position of each example at an index; the number of examples for an index that is dropped."""
    size, total = td._size, math.prod(td._size)
    positions = torch.arange(total, device=td._device).view(size)
    if mode is None:
        return index(build_td({"position": positions}, {}, size, td._device), idx)["position"]
    if mode not in ("drop", "clip"):
        raise DtypeError(message(op, "mode 'drop', 'clip' or None", f"{mode!r}", hint="None raises, as torch does"))
    given = normal_index(td, idx)
    given = given.given if type(given) is Numbers else given
    parts: list[Any] = []
    pad, d = [0] * (2 * len(size)), 0
    for part in entries_of(given):
        free = isinstance(part, (NEW_DIM, GAP, bool))
        if not free and not isinstance(part, slice):
            part = limited(position_of(op, part, td), size[d], mode)
            pad[2 * (len(size) - 1 - d) + 1] = int(mode == "drop")
        parts.append(part)
        d += not free
    positions = F.pad(positions, pad, value=total)
    return index(build_td({"position": positions}, {}, positions.shape, td._device), tuple(parts))["position"]


def position_of(op: OpName, part: Any, td: TensorDict) -> int | Tensor:
    """An entry of an index as an int or a tensor of whole numbers or flags."""
    try:
        i = part if isinstance(part, (int, Tensor)) else torch.as_tensor(part, device=td._device)
    except (TypeError, ValueError, RuntimeError):
        i = None
    if isinstance(i, NEW_DIM) or (isinstance(i, Tensor) and (i.is_floating_point() or i.is_complex())):
        hint = "ints, slices, masks and index vectors, as for a tensor"
        raise IndexingError(message(op, "an index of batch dims", describe(part), hint=hint))
    return i


def limited(i: int | Tensor, n: int, mode: str) -> int | Tensor:
    """Indices along a dim of size `n` within range: clipped to it, or those outside as `n`."""
    if isinstance(i, Tensor):
        if mode == "clip":
            return i.clamp(-n, n - 1)
        return torch.where((i >= -n) & (i < n), torch.where(i < 0, i + n, i), n)
    if mode == "clip":
        return max(-n, min(i, n - 1))
    return n if not -n <= i < n else i + n if i < 0 else i


register("at", At)
