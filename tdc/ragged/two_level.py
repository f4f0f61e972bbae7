"""TwoLevelTensor: a batch of NestedTensors, packed: documents of sentences of tokens.

    documents     [a b c] [d]  |  |  [e f]            3 documents of 2, 0 and 1 sentences
    values        a NestedTensor of all sentences      3 examples of 3, 1 and 2 tokens
    offsets       0 2 2 3                              where documents begin among the sentences

An outer example (a document) is a NestedTensor, its inner examples (the sentences) are tensors. `x.values` has the
inner examples of all documents in one ordinary packed batch, so every operation and every stock module works on this
level as it does on any NestedTensor, and `x.with_values(result)` puts the documents back around it. Neither copies an
element:

    logical shape (B, -1, -1, D)      x.values (S, -1, D)      S inner examples
    x.with_values(y), y (S, -1, E)    -> (B, -1, -1, E)        again two levels
    x.with_values(y), y (S, E)        -> NestedTensor (B, -1, E), one entry for each sentence of a document

Invariants:
  - immutable, as the NestedTensor in it; dim 0 are documents, dim 1 their inner examples, the others are those of
    `x.values`, one further behind;
  - one graph serves all numbers of documents, sentences and tokens: all three are dynamic;
  - no operation takes a document for a sentence: what has no rule for two levels is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, final, overload

import torch
from torch import Tensor

from tdc.core.arguments import GAP, NEW_DIM, entries_of, expect_number, normal_dim
from tdc.core.asserts import require
from tdc.core.container import Container
from tdc.core.dynamo import has_numbers, known, traced_for
from tdc.core.errors import DtypeError, IndexingError, ShapeError, StructureError, describe, describe_index, message
from tdc.core.pytree import register
from tdc.core.ragged_size import RaggedSize
from tdc.core.slow_paths import announce
from tdc.layout.segments import lengths_of, lengths_on_host, longest, on_host, structure_of_sizes, sums_of
from tdc.layout.structure import Structure, check_ends, check_offsets, extent_of, require_same
from tdc.ragged.display import shown, text
from tdc.ragged.index_forms import FULL, takes_all
from tdc.ragged.nested import UNMAPPED, NestedTensor, build_nested, check_bound, example, mapped, require_bound
from tdc.ragged.unflattened import expect_offsets

if TYPE_CHECKING:
    from tdc.ragged.operations import TwoLevelOperations as Operations
else:
    Operations = Container

OP = "ragged.TwoLevelTensor"


@final
class TwoLevelTensor(Operations):
    """A batch of NestedTensors, documents of sentences for instance, packed into one.

    Shapes:
        values `(S, *S0, -1, *S1)`, offsets `(B+1,)` -> logical `(B, -1, *S0, -1, *S1)`.

    Dtypes:
        values any; offsets int64 on the device of values.

    Args:
        values: the inner examples of all outer ones, one after another; its batch is dim 0.
        offsets: where each outer example begins among the inner ones, and S.
        max_length: how many inner examples the longest outer one has, or a bound of it; see `NestedTensor`.

    Raises:
        DtypeError: values are not a NestedTensor, offsets not an int64 tensor.
        ShapeError: offsets are not `(B+1,)`; the batch of values is not dim 0.
        StructureError: they are on different devices; lengths in place of offsets; an outer example that is longer than
            `max_length`.

    Compile:
        One graph for all lengths of both levels and all batch sizes.

    Example:
        >>> from tdc.ragged.pack import from_list, pack
        >>> x = pack([from_list([[1, 2, 3], [4]]), from_list([[5, 6]])])
        >>> x.shape, x.lengths, x.tolist()
        (torch.Size([2, -1, -1]), tensor([2, 1]), [[[1, 2, 3], [4]], [[5, 6]]])
        >>> x.with_values(x.values.sum(1)).tolist()
        [[6, 4], [11]]

    Source:
        `tf.RaggedTensor` of ragged rank 2.
    """

    __slots__ = ("__weakref__", "_structure", "_values")
    _kind = "two_level"
    _rank = 2
    _title = OP
    _settings: ClassVar = {"requires_grad": "x.requires_grad_()"}
    _instead = "x.with_values(values), or tdc.pack(documents)"

    _values: NestedTensor
    _structure: Structure

    def __init__(self, values: NestedTensor, offsets: Tensor, *, max_length: int | None = None) -> None:
        if not isinstance(values, NestedTensor) or not isinstance(offsets, Tensor):
            got, hint = f"{describe(values)} and {describe(offsets)}", "tdc.pack([nested, nested])"
            raise DtypeError(message(OP, "a NestedTensor of values and a tensor of offsets", got, hint=hint))
        check_offsets(offsets, OP)
        check_batch(values, OP)
        if values.device != offsets.device:
            got, hint = f"values on {values.device}, offsets on {offsets.device}", "offsets.to(values.device)"
            raise StructureError(message(OP, "values and offsets on one device", got, hint=hint))
        if max_length is not None:
            expect_number(OP, max_length, whole=True)
        bound = () if max_length is None else (max_length,)
        check_bound(bound)
        structure = Structure(offsets, None, extent_of(bound, values.device) if bound else None).marked()
        if bound:
            require_bound(structure, bound)
        check_ends(offsets, values.batch_size[0], OP)
        self._values = values
        self._structure = structure

    @property
    def values(self) -> NestedTensor:
        """The inner examples of all outer ones, one after another: `(S, *S0, -1, *S1)`."""
        return self._values

    @property
    def _content(self) -> Any:
        return self._values._content if isinstance(self._values, NestedTensor) else None

    @property
    def structure(self) -> Structure:
        """Structure of the outer examples: the inner ones of each."""
        return self._structure

    @property
    def offsets(self) -> Tensor:
        """Offsets of outer examples among the inner ones, (B+1,) int64."""
        return self._structure.offsets

    @property
    def lengths(self) -> Tensor:
        """Inner examples of each outer one, (B,) int64."""
        return lengths_of(self._structure)

    @property
    def inner_lengths(self) -> NestedTensor:
        """Packed elements of each inner example, `(B, -1)` int64."""
        return build_nested(self._structure, self._values.lengths)

    @property
    def max_length(self) -> int:
        """Inner examples of the longest outer one, or a bound it was built with; else read from the data."""
        return longest(self._structure)[0]

    @property
    def batch_size(self) -> torch.Size:
        """The batch dims, `(B,)`."""
        return torch.Size((self._structure.batch_size,))

    @property
    def shape(self) -> torch.Size:
        """Logical shape. On ragged dims it prints as -1 and equals -1; to compute with it is a ShapeError."""
        sizes: list[Any] = [self._structure.batch_size, RaggedSize(), *self._values.shape[1:]]
        return torch.Size(sizes)

    @property
    def ndim(self) -> int:
        """Number of logical dims, that of documents among them."""
        return self._values.ndim + 1

    @property
    def ragged_dims(self) -> tuple[int, ...]:
        """The logical dims that are ragged: dim 1, and those of the inner examples."""
        return (1, *[d + 1 for d in self._values.ragged_dims])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return self._values.dtype

    @property
    def device(self) -> torch.device:
        """Device of values and offsets."""
        return self._values.device

    @property
    def requires_grad(self) -> bool:
        """True if the elements require grad."""
        return self._values.values.requires_grad

    @property
    def grad(self) -> TwoLevelTensor | None:
        """Gradient of the elements, as a batch of the same lengths."""
        found = self._values.values.grad
        return None if found is None else build_two_level(self._structure, self._values.with_values(found))

    def requires_grad_(self, requires_grad: bool = True) -> TwoLevelTensor:
        """Make the elements a leaf of autograd. Returns this object, as torch does."""
        self._values.values.requires_grad_(requires_grad)
        return self

    def numel(self) -> int:
        """Number of real elements."""
        return self._values.numel()

    def __len__(self) -> int:
        return self._structure.batch_size

    def __iter__(self) -> Iterator[NestedTensor]:
        return iter(self.unbind())

    def __repr__(self) -> str:
        if not isinstance(self._content, Tensor):
            return f"TwoLevelTensor({type(self._values).__name__})"
        inner, s = self._values, self._structure
        if not has_numbers(inner._values, inner._structure.offsets, s.offsets):
            return text(self, {}, None)
        spans: list[Any] = [on_host(s.offsets[i : i + 2]) for i in shown(s.batch_size)]
        rows = [([example(inner, begin + j) for j in shown(end - begin)], end - begin) for begin, end in spans]
        return text(self, {"lengths": self.lengths, "inner_lengths": inner.lengths}, rows)

    @overload
    def with_values(self, values: NestedTensor) -> TwoLevelTensor: ...
    @overload
    def with_values(self, values: Tensor) -> NestedTensor: ...
    def with_values(self, values: NestedTensor | Tensor) -> TwoLevelTensor | NestedTensor:
        """The outer examples around other inner ones, in the order of `x.values`. Copies nothing.

        Shapes:
            `(S, *S0, -1, *S1) -> (B, -1, *S0, -1, *S1)`; dense `(S, *D) -> (B, -1, *D)`, a NestedTensor.

        Raises:
            DtypeError: neither a NestedTensor nor a tensor.
            ShapeError: another number of inner examples.

        Example:
            >>> from tdc.ragged.pack import from_list, pack
            >>> x = pack([from_list([[1.0, 3.0], [4.0]]), from_list([[5.0]])])
            >>> x.with_values(x.values.mean(1)).tolist()
            [[2.0, 4.0], [5.0]]
        """
        s, count = self._structure, self._values.batch_size[0]
        if not isinstance(values, (NestedTensor, Tensor)):
            hint = "a result of x.values, packed or with one entry for each inner example"
            raise DtypeError(message("with_values", "a NestedTensor or a tensor", describe(values), hint=hint))
        if isinstance(values, NestedTensor):
            check_batch(values, "with_values")
        if values.ndim == 0 or known(values.shape[0] != count):
            hint = "values are those of all inner examples, in the order of x.values"
            raise ShapeError(message("with_values", f"{count} inner examples", describe(values), hint=hint))
        return build_two_level(s, values) if isinstance(values, NestedTensor) else build_nested(s, values)

    def unbind(self, dim: int = 0) -> tuple[NestedTensor, ...]:
        """The outer examples, each a NestedTensor that shares memory with this batch; reads offsets on the host."""
        if normal_dim(dim, self.ndim, "unbind") != 0:
            hint = "x.values.unbind(d - 1) for dims of inner examples"
            raise ShapeError(message("unbind", "dim 0, the outer examples", f"dim {dim}", hint=hint))
        announce("loops", "unbind")
        rows: list[NestedTensor] = []
        begin = 0
        for n in lengths_on_host(self._structure):
            rows.append(self._values[begin : begin + n])
            begin += n
        return tuple(rows)

    def tolist(self) -> list[Any]:
        """Outer examples as nested Python lists."""
        return [row.tolist() for row in self.unbind()]

    def to(self, *args: Any, **kwargs: Any) -> TwoLevelTensor:
        """`Tensor.to` for the values; the structure follows to the device."""
        values, s = self._values.to(*args, **kwargs), self._structure
        if values.device == s.offsets.device:
            return build_two_level(s, values)
        extent = None if s.extent is None else extent_of(longest(s), values.device)
        return build_two_level(Structure(s.offsets.to(values.device), None, extent).marked(), values)

    def pin_memory(self) -> TwoLevelTensor:
        """A copy in page-locked memory, as `DataLoader(pin_memory=True)` asks for."""
        s = self._structure
        return build_two_level(Structure(s.offsets.pin_memory(), None, s.extent).marked(), self._values.pin_memory())

    def __getitem__(self, index: Any) -> Any:
        """Outer examples, inner ones of each, and what lies in these.

            x[i]  x[a:b]  x[mask]  x[rows]   documents: one as a NestedTensor, several with two levels
            x[:, 1:]  x[:, [0, 2]]  x[m]     sentences of each, `m` a bool NestedTensor (B, -1): two levels
            x[:, 0]  x[rows, positions]      one sentence of each document, or of each named: NestedTensor (B, -1, D)
            x[:, :, 0]  x[..., 0]            positions and features of each sentence, as of `x.values`

        Raises:
            IndexingError: an example that is not there, or a new dim in front of inner examples.

        Compile:
            One graph.
        """
        if isinstance(index, TwoLevelTensor):
            require_same(self._structure, index._structure, "index")
            return build_two_level(self._structure, self._values[index._values])
        numbers: Any = numbered(self)
        if isinstance(index, NestedTensor):
            return inner_at(self, numbers[index], ())
        first, second, rest = levels_of(index, self.ndim)
        if isinstance(first, int):
            return at_outer(self, first, second, rest)
        if takes_all(first) and takes_all(second):
            inner: NestedTensor | Tensor = self._values[(FULL, *rest)]
            return self.with_values(inner)
        return inner_at(self, numbers[first] if takes_all(second) else numbers[first, second], rest)


def build_two_level(s: Structure, values: NestedTensor) -> TwoLevelTensor:
    """A TwoLevelTensor without checks: what operations return."""
    out = object.__new__(TwoLevelTensor)
    out._values = values
    out._structure = s
    return out


def one_outer(x: TwoLevelTensor, i: int) -> Any:
    """An outer example as a view, a NestedTensor."""
    rows = x._structure.batch_size
    if not -rows <= i < rows:
        hint = f"rows are counted from {-rows} to {rows - 1}" if rows else "the batch has no rows"
        raise IndexingError(message("index", f"one of {rows} rows", f"{i}", hint=hint))
    ends = on_host(x._structure.offsets[i % rows : i % rows + 2])
    return x._values[ends[0] : ends[1]]


def at_outer(x: TwoLevelTensor, i: int, second: Any, rest: tuple[Any, ...]) -> Any:
    """Inner examples of an outer one, and what lies in them."""
    return one_outer(x, i)[(second, *rest)]


@traced_for(at_outer)
def at_outer_traced(x: TwoLevelTensor, i: int, second: Any, rest: tuple[Any, ...]) -> Any:
    """Replace `at_outer` in graphs, whose slices take no ends that are read: inner examples by their numbers."""
    inner = x._values[numbered(x)[i] if takes_all(second) else numbered(x)[i, second]]
    if len(rest) == 0:
        return inner
    return inner[rest] if isinstance(inner, Tensor) else inner[(FULL, *rest)]


def numbered(x: TwoLevelTensor) -> NestedTensor:
    """The number of each inner example among all, (B, -1)."""
    return build_nested(x._structure, torch.arange(x._values.batch_size[0], device=x.device))


def inner_at(x: TwoLevelTensor, which: NestedTensor | Tensor, rest: tuple[Any, ...]) -> Any:
    """Inner examples by their number among all, indexed by `rest`, in the outer ones that `which` has."""
    if isinstance(which, Tensor) and which.ndim == 2:  # as many of each outer one
        rows, count = which.shape
        sizes = torch.full((rows, 1), count, device=which.device)
        which = build_nested(structure_of_sizes(sizes, (count,)), which.flatten())
    nested = isinstance(which, NestedTensor)
    numbers = which.values if nested else which
    if numbers.ndim != 1:
        got, hint = f"positions with {numbers.ndim - 1} dims", "x[:, positions], (K,)"
        raise IndexingError(message("index", "positions (K,) among inner examples", got, hint=hint))
    found = x._values[numbers]
    found = found[(FULL, *rest)] if len(rest) > 0 else found
    if not nested:
        return found
    return build_two_level(which.structure, found) if isinstance(found, NestedTensor) else which.with_values(found)


def levels_of(index: Any, ndim: int) -> tuple[Any, Any, tuple[Any, ...]]:
    """The entries of an index for outer examples, for inner ones, and those of `x.values[:, ...]`."""
    parts = list(entries_of(index))
    gaps = [i for i, part in enumerate(parts) if isinstance(part, GAP)]
    if len(gaps) > 1:
        raise IndexingError(message("index", "`...` once", f"{len(gaps)} times", hint="leave the others out"))
    if gaps:
        fill = ndim - len([part for part in parts if not isinstance(part, (GAP, NEW_DIM))])
        parts[gaps[0] : gaps[0] + 1] = [FULL] * fill
    parts += [FULL] * (2 - len(parts))
    if isinstance(parts[0], NEW_DIM) or isinstance(parts[1], NEW_DIM):
        got, hint = describe_index(index), "x.values[:, None] for a new dim of inner examples"
        raise IndexingError(message("index", "an entry for outer examples and one for inner ones", got, hint=hint))
    return parts[0], parts[1], tuple(parts[2:])


def check_batch(values: NestedTensor, op: str) -> None:
    """Inner examples are along dim 0."""
    if values.structure.batch_dim != 0:
        got = f"{describe(values)} with the batch at dim {values.structure.batch_dim}"
        raise ShapeError(message(op, "values with the batch as dim 0", got, hint="transpose it back first"))


def as_levels(x: NestedTensor, dim: int, lengths: NestedTensor, like: Structure | None = None) -> TwoLevelTensor:
    """The ragged dim of a NestedTensor as two levels, by the lengths of the inner examples of each. Copies nothing.

    Args:
        lengths: `(B, -1)` int64, which add up to the length of each example.
        like: the structure of these inner examples, where there is one.

    Raises:
        DtypeError: lengths are not int64.
        ShapeError: another dim than 1, or lengths that are not `(B, -1)`.
        StructureError: lengths that add up to others. Immediate on CPU, asynchronous on CUDA.
    """
    s, t = x.structure, lengths.structure
    if lengths.dtype != torch.int64:
        expected = "int64 lengths of parts, or a batch with several ragged dims"
        raise DtypeError(message("unflatten", expected, describe(lengths), hint="lengths.long()"))
    one = s.packed_dim == s.batch_dim == t.batch_dim == 0 and s.ragged_ndim == 1
    if not one or normal_dim(dim, x.ndim, "unflatten") != 1 or lengths.ndim != 2 or len(lengths) != len(x):
        expected = f"dim 1 of a NestedTensor (B, -1, ...) and lengths ({len(x)}, -1) of its parts"
        got, hint = f"dim {dim} of {describe(x)} and {describe(lengths)}", "transpose the ragged dim to dim 1"
        raise ShapeError(message("unflatten", expected, got, hint=hint))
    offsets = sums_of(lengths.values)
    hint = "take them of the batch that was flattened: y.unflatten(1, x)"
    text = message("unflatten", "parts that add up to each example", "others", hint=hint)
    require((offsets.index_select(0, t.offsets) == s.offsets).all() & (lengths.values >= 0).all(), text)
    inner = Structure(offsets, None, None if like is None else like.extent).marked()
    return build_two_level(t, build_nested(inner, x.values))


def flatten_two_level(x: TwoLevelTensor) -> tuple[list[Any], tuple[Any, ...]]:
    """Children and context: the inner batch and tensors. No sizes."""
    s = x._structure
    optional = [] if s.extent is None else [None if s.extent is UNMAPPED else s.extent]
    return [x._values, s.offsets, *optional], (s.extent is not None,)


def unflatten_two_level(children: Sequence[Any], context: tuple[Any, ...]) -> TwoLevelTensor:
    """A TwoLevelTensor of any children."""
    inner = children[0].structure.offsets if isinstance(children[0], NestedTensor) else None
    expect_offsets("TwoLevelTensor", children[1], inner, -1, 1)
    extent = mapped(children[2]) if context[0] else None
    return build_two_level(Structure(children[1], None, extent), children[0])


def child_names(context: tuple[Any, ...]) -> list[str]:
    """Attribute names of the children."""
    return ["values", "offsets", *["extent"] * context[0]]


register(TwoLevelTensor, flatten_two_level, unflatten_two_level, child_names)
