"""One example of a ragged batch, as a block sees it.

A block runs under one level of vmap, where a dense value of each example is a batched tensor. A `RaggedExample` keeps
its batch whole instead: an operation on it leaves the level, runs once for the batch, as the table in `per_example`
says, and its results enter the level again. Operations without a row, and other transforms, are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.autobatch.per_example import index, table
from tdc.autobatch.values import Lane, lane_of
from tdc.compile._torch.levels import current_level, mapped, outside, physical
from tdc.core.arguments import normal_dim
from tdc.core.dynamo import is_batched
from tdc.core.rules import OPERATORS, REFLECTED, SWAPPED, UNARY_OPERATORS
from tdc.core.typing import Op
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import map_results, ragged_sizes

DETACHED = "x.detach()"  # instead of `x.data`, which vmap lacks


class RaggedExample:
    """An example of a batch, any dims of which may be ragged.

    Attributes:
        batch: the whole batch; dim 0 counts examples.
        level: the vmap level of the block.
    """

    is_nested = is_sparse = is_quantized = False

    def __init__(self, batch: NestedTensor, level: int) -> None:
        self.batch = batch
        self.level = level

    @property
    def dtype(self) -> torch.dtype:
        return self.batch.dtype

    @property
    def device(self) -> torch.device:
        return self.batch.values.device

    @property
    def requires_grad(self) -> bool:
        return self.batch.values.requires_grad

    @property
    def is_cuda(self) -> bool:
        return self.batch.values.is_cuda

    @property
    def ndim(self) -> int:
        return self.batch.ndim - 1

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple([self.size(d) for d in range(self.ndim)])

    @property
    def data(self) -> Any:
        table.refuse("x.data", DETACHED)

    @property
    def T(self) -> Any:
        return torch.t(self)  # type: ignore[arg-type]  # an example of at most two dims

    @property
    def mT(self) -> Any:
        return torch.transpose(self, -2, -1)  # type: ignore[arg-type]  # an example

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """The sizes, or one of them; that of a ragged dim is a 0-d tensor."""
        if dim is None:
            return self.shape
        x, d = self.batch, normal_dim(dim, self.ndim, "size") + 1
        if d not in x.ragged_dims:
            return x.shape[d]
        return mapped(ragged_sizes(x)[:, x.ragged_dims.index(d)], self.level)

    def is_floating_point(self) -> bool:
        return self.batch.dtype.is_floating_point

    def is_complex(self) -> bool:
        return self.batch.dtype.is_complex

    def new_tensor(self, data: Any, **options: Any) -> Tensor:
        return self.batch.values.new_tensor(data, **options)

    def unbind(self, dim: int = 0) -> Any:
        return torch.unbind(self, dim)  # type: ignore[arg-type]  # an example

    def __getitem__(self, entries: Any) -> Any:
        return indexed(self, entries)

    def __len__(self) -> int:
        table.refuse("len(x), which differs between examples: x.size(0)")

    def __iter__(self) -> Any:
        table.refuse("an iteration inside of an expression", "for row in x: ... as a statement")

    def __contains__(self, item: Any) -> bool:
        table.refuse("`in` of a ragged example", "(x == item).any()")

    def __bool__(self) -> bool:
        table.refuse("the truth of a ragged example", "x.any() or x.all()", "a condition of one element")

    def __float__(self) -> float:
        table.refuse("float(x) of a ragged example", "x.float()")

    def __getattr__(self, name: str) -> Any:
        table.refuse(f"x.{name}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(table.row_of(func), args, kwargs or {})


def example_in(x: Any) -> RaggedExample | None:
    """The first example among arguments, in lists as well."""
    for a in x:
        if isinstance(a, RaggedExample):
            return a
        found = example_in(a) if isinstance(a, (tuple, list)) else None
        if found is not None:
            return found
    return None


def run(row: str, args: Any, kwargs: Any) -> Any:
    """The result of a row of the table, for the whole batch."""
    level = level_of(example_in((*args, *kwargs.values())))
    named = {name: whole(a, level) for name, a in kwargs.items()}
    return computed(table.call, row, [whole(a, level) for a in args], named)


def level_of(x: RaggedExample | None) -> int:
    """The level of the block; UnsupportedError where an example is used in another transform."""
    level = current_level()
    if x is None or x.level != level:
        expected, hint = "no transform between a block and its examples", "transform the function of batch from outside"
        table.refuse("a ragged example in a transform of torch.func", hint, expected)
    return level


def whole(x: Any, level: int) -> Any:
    """An operand of one example as that of the batch."""
    if isinstance(x, RaggedExample):
        return x.batch
    if isinstance(x, Tensor):
        return lane_of(physical(x, level)) if is_batched(x) else x
    if isinstance(x, (tuple, list)) and any([isinstance(a, (RaggedExample, Tensor)) for a in x]):
        return [whole(a, level) for a in x]
    return x


def examples(x: Any, level: int) -> Any:
    """A result of the batch as that of one example."""
    if isinstance(x, NestedTensor):
        return RaggedExample(x if x.structure.batch_dim == 0 else x.movedim(x.structure.batch_dim, 0), level)
    if isinstance(x, Tensor):
        return mapped(x, level)
    if type(x) is Lane:
        return mapped(x.data, level)
    return map_results(x, lambda part: examples(part, level)) if isinstance(x, (tuple, list)) else x


def indexed(x: RaggedExample, entries: Any) -> Any:
    """`x[entries]`."""
    level = level_of(x)
    several = isinstance(entries, tuple) and not isinstance(entries, index.Span)
    parts = [index_entry(e, level) for e in (entries if several else (entries,))]
    return computed(index.picked, x.batch, parts)


def index_entry(entry: Any, level: int) -> Any:
    """An entry of an index as that of the batch."""
    if isinstance(entry, index.Span):
        return index.Span(*[whole(e, level) for e in entry])
    if isinstance(entry, Tensor) and entry.ndim == 0 and entry.dtype is torch.uint8:
        table.refuse("one of uint8, which torch takes for a mask", "x[i.long()]", "a position of another dtype")
    return whole(entry, level)


def looked_up(table_: Tensor, x: RaggedExample) -> Any:
    """`table[x]` of a dense tensor."""
    return computed(index.looked_up, whole(table_, x.level), x.batch)


def first_rows(x: Tensor, span: index.Span) -> Any:
    """`x[start:stop]` of a dense tensor, with an end of each example."""
    level = current_level()
    return computed(index.first_rows, whole(x, level), index_entry(span, level))


def picked_way(taken: Any, yes: RaggedExample, no: RaggedExample) -> Any:
    """`yes if taken else no` of examples, which may have different lengths."""
    return computed(index.picked_way, whole(taken, yes.level), yes.batch, no.batch)


def put_rows(x: RaggedExample, entries: Any, value: Any) -> Any:
    """The value of `x` after `x[entries] = value`."""
    return computed(index.put_rows, x.batch, index_entry(entries, x.level), whole(value, x.level))


def computed(fn: Op, *args: Any) -> Any:
    """The result of a function of the whole batch, as that of one example."""
    level = current_level()
    with outside():
        found = fn(*args)
    return examples(found, level)


def as_method(op: Any, name: str) -> Op:
    """A method that runs the row of an operation."""

    def method(self: RaggedExample, *args: Any, **kwargs: Any) -> Any:
        return run(table.row_of(op), (self, *args), kwargs)

    method.__name__ = method.__qualname__ = name
    return method


def as_operator(op: Any, name: str, turned: bool = False) -> Op:
    """An operator that runs the row of an operation; `turned` swaps the operands."""

    def method(self: RaggedExample, other: Any) -> Any:
        if not isinstance(other, (RaggedExample, Tensor, int, float, complex)):
            return NotImplemented
        return run(table.row_of(op), (other, self) if turned else (self, other), {})

    method.__name__ = method.__qualname__ = name
    return method


def maker(name: str) -> Op:
    """`new_zeros` or the like: a shared tensor, or one as ragged as `x` where a size is that of a ragged dim."""

    def method(self: RaggedExample, *args: Any, **options: Any) -> Any:
        args = (options.pop("size"), *args) if "size" in options else args
        sizes = args[0] if args and isinstance(args[0], (tuple, list)) else args
        if any([isinstance(n, Tensor) and is_batched(n) for n in sizes]):
            return run(table.row_of(getattr(torch.Tensor, name)), (self, *args), options)
        return getattr(self.batch.values, name)(*args, **options)

    return method


for _name, _op in OPERATORS.items():
    setattr(RaggedExample, f"__{_name}__", as_operator(_op, f"__{_name}__"))
for _name, _op in UNARY_OPERATORS.items():
    setattr(RaggedExample, f"__{_name}__", as_method(_op, f"__{_name}__"))
for _name in REFLECTED:
    setattr(RaggedExample, f"__r{_name}__", as_operator(OPERATORS[_name], f"__r{_name}__", _name in SWAPPED))
for _name in ("new_zeros", "new_ones", "new_empty", "new_full"):
    setattr(RaggedExample, _name, maker(_name))
for _name in dir(torch.Tensor):
    _method = getattr(torch.Tensor, _name)
    _own = not _name.startswith("_") and not hasattr(RaggedExample, _name) and callable(_method)
    if _own and table.NESTED.get(_method) in table.TABLE:
        setattr(RaggedExample, _name, as_method(torch.matmul if _name == "matmul" else _method, _name))
