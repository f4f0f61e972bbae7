"""The size of a ragged dim: a number that no code may compute with, since the rows differ.

    x.shape                  torch.Size([3, -1, 8])     it prints as -1 and equals -1
    x.shape[1] > 1           ShapeError                 so do range, slices, arithmetic and torch.zeros(x.shape)
    dense.view(x.shape)      taken as -1                view, reshape and expand, and operations of this library

A plain -1 would answer silently: `table[:, :x.shape[1]]` drops the last entry. A `torch.Size` holds ints and SymInts
only, and C++ reads an int past every method, so this is a SymInt: Python calls the methods here, functions of torch
`__torch_function__`, and C++ the `node`.

`torch.ones(n, n)` fails with torch's own words: the parser takes a first argument that has `__torch_function__` for all
sizes, and then has one too many. It asks nothing of Python that could raise another error; `torch.ones((n, n))` does.

Invariants: only equality, hash and text give an answer; a graph traces the same class, and may return it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from tdc.core.errors import ShapeError, message
from tdc.core.typing import Op

HINT = "x.lengths of all rows, x.max_length of the longest, tdc.positions(x) for range"
MADE = "torch.zeros_like(x) and the like; recurrent layers are built with batch_first=True"
MASK = "nn.TransformerEncoder(...)(x, mask=..., is_causal=True or False); torch.full_like(x, value) of elements"
VIEWS = (Tensor.view, Tensor.reshape, torch.reshape, Tensor.expand, Tensor.unflatten, torch.unflatten)
FACTORIES = (torch.zeros, torch.ones, torch.empty, torch.full, torch.rand, torch.randn)
NUMBERS = [
    "bool", "int", "float", "complex", "index", "round", "trunc", "floor", "ceil", "neg", "pos", "abs", "invert",
    "iter",
]  # fmt: skip
ORDERS = ["lt", "le", "gt", "ge"]
BITS = ["and", "or", "xor"]
ARITHMETIC = [*BITS, "add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift"]


def refuse(op: str | Op, hint: str = HINT) -> NoReturn:
    """Raise for a question that the size of a ragged dim does not answer."""
    raise ShapeError(message(op, "one size", "that of a ragged dim, whose rows differ", hint=hint))


class Unknown:
    """The node of a `RaggedSize`: what C++ and Dynamo ask for its number."""

    def has_hint(self) -> bool:
        """False: a graph does not take it as an input; it breaks there."""
        return False

    def __getattr__(self, name: str) -> NoReturn:
        refuse("size")


class RaggedSize(torch.SymInt):
    """The entry of a shape for a ragged dim."""

    node: Any = Unknown()

    def __init__(self) -> None:
        """There is but one value."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedSize) or (isinstance(other, int) and other == -1)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(-1)

    def __repr__(self) -> str:
        return "-1"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return RaggedSize, ()

    def __copy__(self) -> RaggedSize:
        return self

    def __deepcopy__(self, memo: Any) -> RaggedSize:
        return self

    @classmethod
    def __torch_function__(cls, func: Op, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in VIEWS:
            if count_in([*args, *(kwargs or {}).values()]) > 1:
                refuse(func)
            named: dict[str, Any] = kwargs or {}
            return func(*[plain(a) for a in args], **{name: plain(a) for name, a in named.items()})
        refuse(func, MASK if func is torch.full else MADE if func in FACTORIES else HINT)


def plain(given: Any) -> Any:
    """Sizes with -1 for those of ragged dims; anything else as it is."""
    sizes: Any = given
    if isinstance(given, (tuple, list)):
        return [plain(n) for n in sizes]
    return -1 if isinstance(given, RaggedSize) else given


def count_in(given: Any) -> int:
    """Number of sizes of ragged dims among arguments; torch infers one."""
    sizes: Any = given
    if isinstance(given, (tuple, list)):
        return sum([count_in(n) for n in sizes])
    return int(isinstance(given, RaggedSize))


def refusing(name: str) -> Op:
    """A method of numbers that raises."""

    def method(self: RaggedSize, *others: Any) -> NoReturn:
        refuse(name)

    return method


for _name in (*NUMBERS, *ORDERS, *ARITHMETIC, *[f"r{_name}" for _name in ARITHMETIC]):
    setattr(RaggedSize, f"__{_name}__", refusing(_name))
