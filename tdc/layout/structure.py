"""Ragged structure: where each example of a packed batch begins and ends, and along which axes.

A packed batch is `values` plus a `Structure`. Examples follow one another along one axis of `values`, the packed axis;
`offsets (B+1,)` says where they begin. Several ragged dims are flattened into it, and `shapes (B, R)` holds their
sizes. `extent` carries the longest sizes as the *shape* of an empty tensor, so that they are symbols of a graph.

    element dims    s0 … | r1 … rR | s1 …          R ragged dims, side by side
    values          s0 … |    N    | s1 …          N = sum over rows of r1·…·rR, at index packed_dim
    logical shape   B inserted at batch_dim; ragged dims show as -1

Invariants: offsets is int64, begins with 0, never decreases, ends with N, as `validate` checks; nothing here reads a
value on the host; results that `once` keeps hold no elements, and go into no pytree, copy or file.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, TypeVar, TypeVarTuple

import torch
from torch import Tensor

from tdc.core.arguments import normal_dim
from tdc.core.asserts import require
from tdc.core.dynamo import (
    Stamp,
    content,
    hold,
    is_on_host,
    known,
    mark_dynamic,
    skipped_in_graphs,
    stamp,
    trace_as,
    unchanged_in_graphs,
    version,
)
from tdc.core.errors import DtypeError, ShapeError, StructureError, describe, message
from tdc.core.frozen import Frozen, constant_of, fields, immutable, restore
from tdc.core.ragged_size import RaggedSize
from tdc.core.typing import OpName

MANY = 64  # results of a function that a structure keeps, before it forgets them and begins anew
Args = TypeVarTuple("Args")
Out = TypeVar("Out")


@unchanged_in_graphs
def counted(x: Tensor) -> Tensor:
    """New offsets or sizes as tensors that count changes in place, which those of inference mode do not."""
    if not x.is_inference():
        return x
    with torch.inference_mode(False):
        return x.clone()


class Structure(Frozen):
    """Offsets of a packed batch and where its axes are.

    Shapes: offsets (B+1,) int64; shapes (B, R) int64 or None; extent (longest r1, …, longest rR, 0) or None.
    """

    __slots__ = ("_batch_dim", "_memo", "_packed_dim", "_ragged_ndim", "extent", "offsets", "shapes")
    _constants: ClassVar = {n: constant_of(f"_{n}") for n in ("packed_dim", "batch_dim", "ragged_ndim")}

    offsets: Tensor
    shapes: Tensor | None
    extent: Tensor | None
    _packed_dim: int
    _batch_dim: int
    _ragged_ndim: int
    _memo: dict[str, Any]  # what `once` keeps; unset until it keeps something

    def __init__(
        self, offsets: Tensor, shapes: Tensor | None = None, extent: Tensor | None = None, packed_dim: int = 0,
        batch_dim: int = 0, ragged_ndim: int = 1,
    ) -> None:  # fmt: skip
        put = object.__setattr__
        put(self, "offsets", offsets)
        put(self, "shapes", shapes)
        put(self, "extent", extent)
        put(self, "_packed_dim", packed_dim)
        put(self, "_batch_dim", batch_dim)
        put(self, "_ragged_ndim", ragged_ndim)

    def __repr__(self) -> str:
        return f"Structure(batch_size={self.batch_size}, ragged_dims={self.ragged_dims})"

    def __setattr__(self, name: str, value: Any) -> None:
        raise immutable(self, f"`x.{name} = {type(value).__name__}`")

    def __delattr__(self, name: str) -> None:
        raise immutable(self, f"`del x.{name}`")

    def __reduce__(self) -> tuple[Any, ...]:
        return restore, (Structure, {name: getattr(self, name) for name in fields(Structure) if name != "_memo"})

    @property
    def packed_dim(self) -> int:
        """The axis of values along which examples lie."""
        return self._packed_dim

    @property
    def batch_dim(self) -> int:
        """The logical dim of the batch."""
        return self._batch_dim

    @property
    def ragged_ndim(self) -> int:
        """Number of ragged dims, R."""
        return self._ragged_ndim

    @property
    def batch_size(self) -> int:
        """Number of examples, B."""
        return self.offsets.shape[0] - 1

    @property
    def ragged_dims(self) -> tuple[int, ...]:
        """Logical dims that are ragged."""
        first, batch = self.packed_dim, self.batch_dim
        if self.ragged_ndim == 1:
            return (first + (first >= batch),)
        return tuple([k + (k >= batch) for k in range(first, first + self.ragged_ndim)])

    def moved(self, packed_dim: int, batch_dim: int) -> Structure:
        """The same examples with their axes elsewhere; shares kept results."""
        if (packed_dim, batch_dim) == (self.packed_dim, self.batch_dim):
            return self
        out = Structure(self.offsets, self.shapes, self.extent, packed_dim, batch_dim, self.ragged_ndim)
        return sharing_memo(out, self)

    def marked(self) -> Structure:
        """The same examples; a compiled function serves other numbers of examples with the same graph."""
        shapes = None if self.shapes is None else mark_dynamic(self.shapes, 0)
        offsets = mark_dynamic(self.offsets, 0)
        return Structure(offsets, shapes, self.extent, self.packed_dim, self.batch_dim, self.ragged_ndim)

    def shape(self, values: Tensor) -> torch.Size:
        """Logical shape of a packed batch: on ragged dims a `RaggedSize`, which is equal to -1."""
        e = self.packed_dim
        sizes: list[Any] = list(values.shape)
        sizes[e : e + 1] = [RaggedSize()] * self.ragged_ndim
        sizes.insert(self.batch_dim, self.batch_size)
        return torch.Size(sizes)

    def axis(self, dim: int, ndim: int, op: OpName) -> int | None:
        """The dim of `values` for a logical dim in `[-ndim, ndim)`; None for the batch dim."""
        d = normal_dim(dim, ndim, op)
        if d == self.batch_dim:
            return None
        k = d - (d > self.batch_dim)
        return k if k < self.packed_dim else max(self.packed_dim, k - self.ragged_ndim + 1)

    def with_new_dim(self, dim: int, ndim: int, op: OpName) -> tuple[Structure, int]:
        """The structure with a new static dim at logical `dim`, and the axis of `values` that it becomes."""
        d = normal_dim(dim, ndim + 1, op)
        before = d - (d > self.batch_dim)  # dims of an example in front of it
        if self.packed_dim < before < self.packed_dim + self.ragged_ndim:
            got, hint = f"dim {dim}", "ragged dims stay side by side"
            raise ShapeError(message(op, "a new dim in front of the ragged dims or behind", got, hint=hint))
        axis = before if before <= self.packed_dim else before - self.ragged_ndim + 1
        return self.moved(self.packed_dim + (axis <= self.packed_dim), self.batch_dim + (d <= self.batch_dim)), axis


def memo_of(s: Structure) -> dict[str, Any]:
    """Kept results of a structure, by the name of the function that computed them."""
    try:
        return s._memo
    except AttributeError:
        object.__setattr__(s, "_memo", {})
        return s._memo


@unchanged_in_graphs
def sharing_memo(out: Structure, s: Structure) -> Structure:
    """A new structure that shares the kept results of another one of the same examples."""
    object.__setattr__(out, "_memo", memo_of(s))
    return out


@skipped_in_graphs
def key_of(s: Structure, now: Stamp | None) -> tuple[Any, Any] | None:
    """Version of offsets, as asked for, and of shapes; None where nothing may be kept."""
    shapes_now = True if s.shapes is None else content(s.shapes)
    return None if now is None or shapes_now is None else (now, shapes_now)


def once(fn: Callable[[Structure, *Args], Out]) -> Callable[[Structure, *Args], Out]:
    """Decorate a function of offsets and shapes, which runs once for each structure and its last arguments.

    The result is computed anew after offsets, shapes or the result itself were changed in place. In graphs and under
    transforms nothing is kept, see `stamp`. It is never a tensor of inference mode, which autograd could not save.
    """
    return keeping(fn, stamp)


def once_for_each(fn: Callable[[Structure, *Args], Out]) -> Callable[[Structure, *Args], Out]:
    """`once` that keeps small results for many hashable arguments."""
    return keeping(fn, stamp, many=True)


def once_on_host(fn: Callable[[Structure], Tensor]) -> Callable[[Structure], Tensor]:
    """`once` of a function that reads a structure on the host: its result serves every stream."""
    return keeping(fn, content)


def keeping(
    fn: Callable[[Structure, *Args], Out], stamp: Callable[[Tensor], Stamp | None], many: bool = False
) -> Callable[[Structure, *Args], Out]:
    """`once` by a version of the content."""
    name = fn.__name__

    @wraps(fn)
    def kept(s: Structure, *args: *Args) -> Out:
        known = key_of(s, stamp(s.offsets))
        if known is None:
            return fn(s, *args)
        key, memo = (*known, args), memo_of(s)
        at: Any = name
        if many:
            memo, at = memo.setdefault(name, {}), args
        found = memo.get(at)
        if found is not None and found[0] == key and changes(found[1]) == found[2]:
            return found[1]
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                out = fn(s, *args)
        else:
            out = fn(s, *args)
        if many and len(memo) == MANY:
            memo.clear()
        memo[at] = key, out, changes(out)
        return out

    trace_as(kept, fn)
    return kept


def changes(x: Any) -> Any:
    """Number of changes of a result in place."""
    return (version(x.offsets), version(x.shapes)) if type(x) is Structure else version(x)


def remember(fn: Callable[[Structure], Tensor], s: Structure, out: Tensor | None) -> Structure:
    """Tell a structure the result of a function of `once_on_host`. Returns the structure."""
    key = key_of(s, content(s.offsets))
    if out is not None and key is not None:
        memo_of(s)[fn.__name__] = (*key, ()), out, version(out)
    return s


def remembered(fn: Callable[[Structure], Tensor], s: Structure) -> Tensor | None:
    """The kept result of a function of `once_on_host`; None where it would read now."""
    key = key_of(s, content(s.offsets))
    if key is None:
        return None
    found = memo_of(s).get(fn.__name__)
    return found[1] if found is not None and found[0] == (*key, ()) and version(found[1]) == found[2] else None


def check_offsets(offsets: Tensor, op: OpName) -> None:
    """Refuse offsets that are not int64 with one dim and an entry at least."""
    if offsets.ndim != 1 or offsets.shape[0] < 1:
        hint = f"tdc.{op}(values, offsets), with offsets = tdc.offsets_of(lengths)"
        raise ShapeError(message(op, "offsets of shape (B+1,)", describe(offsets), hint=hint))
    if offsets.dtype != torch.int64:
        hint = "offsets.long() (zero-copy needs int64, torch's jagged layout)"
        raise DtypeError(message(op, "int64 offsets", describe(offsets), hint=hint))


def check_ends(offsets: Tensor, total: int, op: OpName) -> None:
    """Refuse lengths in place of offsets, where reading takes no sync: they add up to N, and do not go from 0 to N."""
    if not is_on_host(offsets):
        return
    last = int(offsets[-1])
    if (last != total or (last and offsets.shape[0] == 1)) and int(offsets.sum()) == total:
        hint = f"tdc.{op}(values, tdc.offsets_of(lengths))"
        raise StructureError(message(op, f"offsets from 0 to N, {total}", "lengths that add up to it", hint=hint))


def other_size(op: OpName, old: Tensor, new: Tensor) -> ShapeError:
    """The error for data of another size than that of the batch it is to replace."""
    made = "tdc.pack(rows), NestedTensor(values, offsets) or MaskedBatch(data, lengths)"
    hint = f"build a batch of other lengths by {made}"
    return ShapeError(message(op, f"data for the lengths of {describe(old)}", describe(new), hint=hint))


def extent_of(longest: tuple[int, ...], device: Any = None) -> Tensor:
    """An empty tensor whose shape carries the longest ragged sizes; its dims are marked dynamic."""
    return mark_dynamic(torch.empty((*longest, 0), dtype=torch.uint8, device=device), *range(len(longest)))


def require_same(a: Structure, b: Structure, op: OpName, hint: str = "") -> None:
    """Refuse with a StructureError two structures that are neither one object nor equal by value.

    The comparison of values is an assertion on the device: immediate on CPU, asynchronous on CUDA, a node in a graph.
    """
    if a is b:
        return
    layout_a, layout_b = (a.packed_dim, a.batch_dim, a.ragged_ndim), (b.packed_dim, b.batch_dim, b.ragged_ndim)
    rows, others = a.offsets.shape[0], b.offsets.shape[0]
    if layout_a != layout_b or known(rows != others):
        got = f"{a.batch_size} rows, ragged dims {a.ragged_dims} and {b.batch_size} rows, ragged dims {b.ragged_dims}"
        raise StructureError(message(op, "operands of one ragged structure", got, hint=hint or SAME_HINT))
    if a.offsets is not b.offsets:
        hold(rows == others)
        same = (a.offsets == b.offsets).all()
        if a.shapes is not None and b.shapes is not None:
            same = same & (a.shapes == b.shapes).all()
        expected, got = "operands of one ragged structure", "rows of different lengths"
        require(same, message(op, expected, got, hint=hint or SAME_HINT))


SAME_HINT = "build both from one structure, e.g. x.with_values(y), or pad both with x.to_padded()"


def check_sizes(shapes: Tensor | None, max_length: tuple[Any, ...] | None, rows: int, op: OpName) -> int:
    """Check metadata of shapes and the longest sizes; return the number of ragged dims."""
    if shapes is not None and (not isinstance(shapes, Tensor) or shapes.dtype != torch.int64):
        raise DtypeError(message(op, "int64 shapes", describe(shapes), hint="shapes.long()"))
    if shapes is not None and (shapes.ndim != 2 or shapes.shape[0] != rows or shapes.shape[1] < 2):
        hint = "one row for each example, one column for each ragged dim; none for one ragged dim"
        raise ShapeError(message(op, f"shapes of ({rows}, R) with R >= 2", describe(shapes), hint=hint))
    count = 1 if shapes is None else shapes.shape[1]
    if max_length is not None and len(max_length) != count:
        got, hint = f"{len(max_length)} sizes", "give one size for each ragged dim"
        raise ShapeError(message(op, f"max_length with {count} sizes", got, hint=hint))
    return count
