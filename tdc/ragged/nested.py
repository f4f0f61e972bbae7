"""NestedTensor: a batch of tensors of different sizes, packed.

    lengths 2, 0, 3          values (N, D)      offsets (B+1,)
    row 0   ■ ■              ■ ■ ■ ■ ■          0 2 2 5
    row 1                    0 0 2 2 2
    row 2   ■ ■ ■            logical shape (3, -1, D)

With one ragged dim this is torch's jagged layout bit for bit, so `to_torch()` and `from_torch()` copy nothing. Several
ragged dims are flattened into the packed axis, and `shapes (B, R)` holds their sizes.

Invariants:
  - immutable; operations return new objects that share the structure;
  - ragged dims are declared by the caller, never inferred from sizes that happen to agree;
  - the packed axis, the offsets and the longest length are dynamic in a compiled graph: one graph serves all batches;
  - operations on the whole batch read no offsets on the host; values may require grad, offsets never do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor

from tdc.core.arguments import expect, expect_devices, expect_number, int_tuple, normal_dim, refuse_to
from tdc.core.asserts import require
from tdc.core.container import Container
from tdc.core.dtypes import of_examples
from tdc.core.dynamo import has_numbers, is_on_host, known, mark_dynamic, mark_only_result, mark_result
from tdc.core.errors import DtypeError, ShapeError, StructureError, describe, message
from tdc.core.pytree import register
from tdc.core.slow_paths import announce
from tdc.core.typing import Dims
from tdc.layout.segments import (
    known_sizes,
    lengths_of,
    lengths_on_host,
    longest,
    longest_on_host,
    on_host,
    sizes_of,
    sizes_on_host,
)
from tdc.layout.structure import Structure, check_ends, check_offsets, check_sizes, extent_of, other_size, remember
from tdc.ragged.display import html, shown, text
from tdc.ragged.unflattened import expect_offsets, expect_sizes

if TYPE_CHECKING:
    from tdc.ragged.operations import NestedOperations as Operations
else:
    Operations = Container

UNMAPPED: Any = object()


@final
class NestedTensor(Operations):
    """A batch of tensors that differ in size along their ragged dims, packed into one tensor.

    Shapes:
        values `(*S0, N, *S1)`, offsets `(B+1,)` -> logical `(B, *S0, -1, *S1)`; the ragged dim shows as -1.

    Dtypes:
        values any; offsets int64 on the device of values.

    Args:
        values: the examples, one after another along the packed axis.
        offsets: where each example begins, and N.
        ragged_dim: the logical dim that is ragged, at least 1; the first of them where there are several.
        shapes: `(B, R)` int64 for R >= 2 ragged dims side by side, flattened into the packed axis.
        max_length: the longest length (a tuple for several ragged dims), or a bound of it. It decides how wide
            padding is, nothing else; it saves a read of the data, and a compiled graph needs it to pad.

    Raises:
        DtypeError: values or offsets are no tensors; offsets or shapes are not int64.
        ShapeError: offsets are not `(B+1,)`, shapes not `(B, R)`, or the ragged dim is not a dim of values.
        StructureError: a row is longer than `max_length`. Immediate on CPU, asynchronous on CUDA. Lengths in place of
            offsets, where these can be read at no cost: eagerly and on CPU.

    Compile:
        One graph for all lengths and batch sizes: the packed axis and offsets are marked dynamic here.
        Content of offsets is read for `max_length` alone; call `validate(x)` where they come from outside.

    Example:
        >>> x = NestedTensor(torch.arange(5.0), torch.tensor([0, 2, 2, 5]))
        >>> x.shape, [row.tolist() for row in x.unbind()]
        (torch.Size([3, -1]), [[0.0, 1.0], [], [2.0, 3.0, 4.0]])

    Source:
        `torch.nested.nested_tensor_from_jagged`.
    """

    __slots__ = ("__weakref__", "_structure", "_values")
    _kind = "nested"
    _settings: ClassVar = {
        "offsets": "x = tdc.NestedTensor(x.values, offsets)",
        "lengths": "x = tdc.NestedTensor(x.values, tdc.offsets_of(lengths))",
        "requires_grad": "x.requires_grad_()",
    }
    _instead = "x.with_values(values), torch.where(mask, new, x), or tdc.pack(rows)"
    _rank = 1

    _values: Any  # a Tensor, some methods of which torch leaves untyped
    _structure: Structure

    def __init__(
        self, values: Tensor, offsets: Tensor | None = None, *, ragged_dim: int = 1, shapes: Tensor | None = None,
        max_length: Dims | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(values, Tensor) or not isinstance(offsets, Tensor):
            got = f"{describe(values)} and {describe(offsets)}"
            raise DtypeError(message("NestedTensor", "tensors of values and offsets", got, hint="tdc.pack(rows)"))
        check_offsets(offsets, "NestedTensor")
        expect_number("NestedTensor", ragged_dim, whole=True)
        if not 1 <= ragged_dim <= values.ndim:
            got = f"ragged_dim={ragged_dim} for values with {values.ndim} dims"
            hint = "dim 0 is the batch; ragged_dim=1 is the first dim of each row"
            raise ShapeError(message("NestedTensor", f"a ragged dim in [1, {values.ndim}]", got, hint=hint))
        if values.device != offsets.device:
            got, hint = f"values on {values.device}, offsets on {offsets.device}", "offsets.to(values.device)"
            raise StructureError(message("NestedTensor", "values and offsets on one device", got, hint=hint))
        sizes = None if max_length is None else int_tuple("NestedTensor", max_length)
        count = check_sizes(shapes, sizes, offsets.shape[0] - 1, "NestedTensor")
        check_bound(sizes or ())
        extent = None if sizes is None else extent_of(sizes, values.device)
        structure = Structure(offsets, shapes, extent, ragged_dim - 1, 0, count).marked()
        if sizes is not None:
            require_bound(structure, sizes)
        check_ends(offsets, values.shape[ragged_dim - 1], "NestedTensor")
        self._values = mark_dynamic(values, ragged_dim - 1)
        self._structure = structure

    @property
    def values(self) -> Tensor:
        """The examples, one after another along the packed axis: `(*S0, N, *S1)`."""
        return self._values

    _content = values

    @property
    def structure(self) -> Structure:
        """Structure: begin and end of examples, and their axes; shared by all results of the same lengths."""
        return self._structure

    @property
    def offsets(self) -> Tensor:
        """Offsets of examples in the packed axis, (B+1,) int64."""
        return self.structure.offsets

    @property
    def lengths(self) -> Tensor:
        """Packed elements of each example, (B,) int64."""
        return lengths_of(self.structure)

    @property
    def sizes(self) -> Tensor:
        """Ragged sizes of each example, (B, R) int64."""
        return sizes_of(self.structure)

    @property
    def max_length(self) -> int:
        """Length of the longest example, or the bound the batch was built with; read from the data if built without."""
        return longest(self.structure)[0]

    @property
    def batch_size(self) -> torch.Size:
        """The batch dims, `(B,)`."""
        return torch.Size((self.structure.batch_size,))

    @property
    def shape(self) -> torch.Size:
        """Logical shape. On ragged dims it prints as -1 and equals -1; to compute with it is a ShapeError."""
        return self._structure.shape(self._values)

    @property
    def _batch_dim(self) -> int:
        """The batch dim, by the name that a MaskedBatch has for it."""
        return self._structure.batch_dim

    @property
    def ndim(self) -> int:
        """Number of logical dims, the batch dim among them."""
        return self._structure.ragged_ndim + self._values.ndim

    @property
    def ragged_dims(self) -> tuple[int, ...]:
        """The logical dims that are ragged."""
        return self._structure.ragged_dims

    def numel(self) -> int:
        """Number of real elements."""
        return self.values.numel()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return self._values.dtype

    @property
    def device(self) -> torch.device:
        """Device of values and offsets."""
        return self.values.device

    def __len__(self) -> int:
        s = self.structure
        return s.batch_size if s.batch_dim == 0 or s.packed_dim == 0 else self.values.shape[0]

    def __repr__(self) -> str:
        if not isinstance(self.values, Tensor):
            return f"NestedTensor({type(self.values).__name__})"
        s = self.structure
        if not has_numbers(self._values, s.offsets):
            return text(self, {}, None)
        sizes = {"lengths": self.lengths} if s.shapes is None else {"sizes": s.shapes}
        return text(self, sizes, [example(self, i) for i in shown(s.batch_size)])

    def _repr_html_(self) -> str:
        return html(self, self.sizes if has_numbers(self._values, self._structure.offsets) else None)

    def with_values(self, values: Tensor) -> NestedTensor:
        """A batch of the same structure with other values, which have the same size along the packed axis.

        Raises:
            DtypeError: they are no tensor.
            ShapeError: they have another size.
        """
        s = self._structure
        expect("with_values", values, Tensor)
        if values.ndim <= s.packed_dim or known(values.shape[s.packed_dim] != self._values.shape[s.packed_dim]):
            raise other_size("with_values", self._values, values)
        return build_nested(s, values)

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """The examples as views; reads the sizes on the host. Along a static dim, ragged batches."""
        s, d = self.structure, normal_dim(dim, self.ndim, "unbind")
        axis = s.axis(d, self.ndim, "unbind")
        if axis == s.packed_dim:
            got, hint = f"ragged dim {dim}", "the elements of each row: [row.unbind() for row in x.unbind()]"
            raise ShapeError(message("unbind", f"a static dim or dim {s.batch_dim}, the batch", got, hint=hint))
        if axis is not None:
            moved = s.moved(s.packed_dim - (axis < s.packed_dim), s.batch_dim - (d < s.batch_dim))
            return tuple([build_nested(moved, part) for part in self.values.unbind(axis)])
        announce("loops", "unbind")
        rows = self._values.split(lengths_on_host(s), s.packed_dim)
        if s.shapes is None:
            return tuple(rows)
        return tuple([row.unflatten(s.packed_dim, n) for row, n in zip(rows, on_host(s.shapes), strict=True)])

    def to(self, *args: Any, **kwargs: Any) -> NestedTensor:
        """`Tensor.to` for the values; the structure follows to the device. A memory format is that of an example."""
        expect_devices(*args, *kwargs.values())
        try:
            values = of_examples(Tensor.to)(self.values, *args, **kwargs)
        except (AssertionError, RuntimeError, TypeError):
            refuse_to(*args, **kwargs)
            raise
        s = self.structure
        if values.device == s.offsets.device:
            return build_nested(s, values)
        offsets, shapes = s.offsets.to(values.device), None if s.shapes is None else s.shapes.to(values.device)
        extent = None if s.extent is None else extent_of(longest(s), values.device)
        moved = Structure(offsets, shapes, extent, s.packed_dim, s.batch_dim, s.ragged_ndim).marked()
        return build_nested(remember(sizes_on_host, moved, known_sizes(s)), values)


def example(x: NestedTensor, i: int) -> Tensor:
    """Return one example as a view. Its offsets are read on the host."""
    s = x._structure
    begin, end = on_host(s.offsets[i : i + 2])
    row = x._values.narrow(s.packed_dim, begin, end - begin)
    return row if s.shapes is None else row.unflatten(s.packed_dim, on_host(s.shapes[i]))


def require_bound(s: Structure, sizes: tuple[int, ...]) -> None:
    """Assert that no example is larger than the given sizes, at once on CPU and asynchronously on CUDA."""
    if is_on_host(s.offsets):
        if any([own > n for own, n in zip(longest_on_host(s), sizes, strict=True)]):
            raise short_bound()
        return
    inside = [(column <= n).all() for column, n in zip(sizes_of(s).unbind(1), sizes, strict=True)]
    require(inside[0] if len(inside) == 1 else torch.stack(inside).all(), str(short_bound()))


def check_bound(sizes: tuple[int, ...]) -> None:
    """Refuse negative bounds, as far as a graph knows."""
    if any([known(n < 0) for n in sizes]):
        raise short_bound()


def short_bound() -> StructureError:
    """The error for a bound below the longest row."""
    expected = "max_length at least as long as the longest row"
    hint = "leave max_length out, or pass a bound of all rows"
    return StructureError(message("NestedTensor", expected, "a shorter one", hint=hint))


def build_nested(s: Structure, values: Tensor) -> NestedTensor:
    """A NestedTensor without checks: what operations return. A structure made by the operation is `marked()` first."""
    out = object.__new__(NestedTensor)
    out._values = mark_result(values, s.packed_dim)
    out._structure = s
    return out


def build_result(s: Structure, values: Tensor) -> NestedTensor:
    """`build_nested` of the one tensor that an operation made: a graph marks that tensor itself, not a view of it."""
    out = object.__new__(NestedTensor)
    out._values = mark_only_result(values, s.packed_dim)
    out._structure = s
    return out


def flatten_nested(x: NestedTensor) -> tuple[list[Any], tuple[Any, ...]]:
    """Children and context: tensors, and how the axes lie. No sizes."""
    s = x.structure
    optional = [None if t is UNMAPPED else t for t in (s.shapes, s.extent) if t is not None]
    context = (s.packed_dim, s.batch_dim, s.ragged_ndim, s.shapes is not None, s.extent is not None)
    return [x.values, s.offsets, *optional], context


def unflatten_nested(children: Sequence[Any], context: tuple[Any, ...]) -> NestedTensor:
    """A NestedTensor of any children."""
    packed_dim, batch_dim, ragged_ndim, has_shapes, has_extent = context
    expect_offsets("NestedTensor", children[1], children[0], packed_dim)
    if has_shapes:
        expect_sizes("NestedTensor", children[2], children[1], ragged_ndim)
    shapes = mapped(children[2]) if has_shapes else None
    extent = mapped(children[-1]) if has_extent else None
    out = object.__new__(NestedTensor)
    out._values = children[0]
    out._structure = Structure(children[1], shapes, extent, packed_dim, batch_dim, ragged_ndim)
    return out


def mapped(child: Any) -> Any:
    """A child that the context lists: None, which `torch.vmap` may put there, must not read as no child at all."""
    return UNMAPPED if child is None else child


def child_names(context: tuple[Any, ...]) -> list[str]:
    """Attribute names of the children."""
    return ["values", "offsets", *[n for n, there in zip(("shapes", "extent"), context[3:], strict=True) if there]]


register(NestedTensor, flatten_nested, unflatten_nested, child_names)
