"""ObjectArray: one Python object for each example of a TensorDict, e.g. captions or file names.

The objects are in a tuple, and an int64 tensor of the array's shape holds their positions in it. torch indexes, masks,
reshapes and stacks that tensor; the tuple stays.

Invariants: immutable; an operation moves positions, never objects; eager only, a compiled function leaves it out.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, final

import torch
from torch import Tensor

from tdc.core.errors import DtypeError, IndexingError, ShapeError, describe, describe_index, message, show_sizes
from tdc.core.frozen import Frozen
from tdc.core.typing import Op
from tdc.tensordict.leaf import register_leaf

MOVES = (
    "reshape", "view", "permute", "transpose", "movedim", "swapaxes", "flatten", "unflatten", "ravel", "squeeze",
    "unsqueeze", "expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave", "tile", "flip", "fliplr",
    "flipud", "roll", "rot90", "narrow", "select", "diagonal", "unfold", "unbind", "split", "chunk", "tensor_split",
    "index_select", "gather", "take_along_dim", "masked_select",
)  # fmt: skip


@final
class ObjectArray(Frozen):
    """One Python object for each example.

    Shapes:
        `(*shape)`; as a leaf of a TensorDict it begins with the batch size, as any other.

    Args:
        items: the objects, in row-major order; or a numpy array of objects or strings.
        shape: of the array, sizes or one int; one dim by default.

    Raises:
        ShapeError: another number of objects than the shape has elements.
        DtypeError: items that are no sequence.

    Compile:
        Eager only: `td.exclude(key)` before a compiled function.

    Example:
        >>> names = ObjectArray(["ada", "bob", "cyd"])
        >>> names[1:].tolist(), names[torch.tensor([True, False, True])].tolist(), names[0].item()
        (['bob', 'cyd'], ['ada', 'cyd'], 'ada')
    """

    __slots__ = ("_items", "_positions")
    _items: tuple[Any, ...]
    _positions: Tensor

    def __init__(self, items: Any, shape: Sequence[int] | int | None = None) -> None:
        if hasattr(items, "ravel"):  # a numpy array
            shape = items.shape if shape is None else shape
            items = items.ravel().tolist()
        try:
            self._items = tuple(items)
        except TypeError:
            got, hint = describe(items), "ObjectArray([x]); ObjectArray([x], ()) has no dims"
            raise DtypeError(message("ObjectArray", "a list of objects", got, hint=hint)) from None
        sizes = [len(self._items)] if shape is None else [shape] if isinstance(shape, int) else shape
        try:
            size = torch.Size(sizes)
        except TypeError:
            hint = "ObjectArray(items, [2, 3])"
            raise DtypeError(message("ObjectArray", "ints as its shape", describe(shape), hint=hint)) from None
        if prod(size) != len(self._items):
            expected, got = f"{prod(size)} objects for shape {show_sizes(size)}", f"{len(self._items)}"
            raise ShapeError(message("ObjectArray", expected, got, hint="leave shape out for one dim"))
        self._positions = torch.arange(len(self._items)).view(size)

    @property
    def shape(self) -> torch.Size:
        """Sizes of the array."""
        return self._positions.shape

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return self._positions.ndim

    def __len__(self) -> int:
        return len(self._positions)

    def __iter__(self) -> Iterator[ObjectArray]:
        return iter([self[i] for i in range(len(self))])

    def __getitem__(self, index: Any) -> ObjectArray:
        try:
            return array(self._items, self._positions[index])
        except (IndexError, TypeError):
            expected, got = f"an index into shape {show_sizes(self.shape)}", describe_index(index)
            hint = "ints, slices, masks and index vectors, as for a tensor"
            raise IndexingError(message("index", expected, got, hint=hint)) from None

    def tolist(self) -> Any:
        """The objects in nested lists."""
        positions: Any = self._positions
        return objects(self._items, positions.tolist())

    def item(self) -> Any:
        """The only object.

        Raises:
            ShapeError: there is not exactly one.
        """
        if self._positions.numel() != 1:
            got, hint = f"{self._positions.numel()}", "index it, or tolist()"
            raise ShapeError(message("item", "one object", got, hint=hint))
        return self._items[int(self._positions)]

    def __eq__(self, other: object) -> Any:
        """Where the objects are equal, or equal to one object: a bool tensor of this shape.

        Raises:
            ShapeError: an array of another shape.
        """
        here = ints(self._positions)
        if isinstance(other, ObjectArray):
            if other.shape != self.shape:
                got = f"{show_sizes(self.shape)} and {show_sizes(other.shape)}"
                raise ShapeError(message("eq", "arrays of one shape", got, hint="index one of them"))
            there = [other._items[i] for i in ints(other._positions)]
        else:
            there = [other] * len(here)
        equal = [self._items[i] == x for i, x in zip(here, there, strict=True)]
        return torch.tensor(equal, dtype=torch.bool).view(self.shape)

    def __ne__(self, other: object) -> Any:
        return ~(self == other)

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"ObjectArray(shape={self.shape})"


def array(items: tuple[Any, ...], positions: Tensor) -> ObjectArray:
    """An ObjectArray of its parts."""
    out = object.__new__(ObjectArray)
    out._items = items
    out._positions = positions
    return out


def ints(positions: Any) -> list[int]:
    """Positions as Python numbers, in row-major order."""
    return positions.flatten().tolist()


def objects(items: tuple[Any, ...], positions: Any) -> Any:
    """Nested lists of positions as nested lists of objects."""
    at: Any = positions
    return [objects(items, p) for p in at] if isinstance(positions, list) else items[at]


def moved(method: str, x: ObjectArray, *args: Any, **kwargs: Any) -> ObjectArray | tuple[ObjectArray, ...]:
    """A method of tensors that moves elements, applied to the positions."""
    out = getattr(x._positions, method)(*args, **kwargs)
    return array(x._items, out) if isinstance(out, Tensor) else tuple([array(x._items, part) for part in out])


def joined(op: Op, xs: Sequence[ObjectArray], dim: int = 0) -> ObjectArray:
    """`stack` or `cat` of arrays: the objects of all, and the positions, each array's behind those before it."""
    items: tuple[Any, ...] = ()
    positions: list[Tensor] = []
    for x in xs:
        positions.append(x._positions + len(items))
        items = items + x._items
    return array(items, op(positions, dim))


register_leaf(
    ObjectArray,
    shape=lambda x: x.shape,
    index=lambda x, index: x[index],
    stack=partial(joined, torch.stack),
    cat=partial(joined, torch.cat),
    ops={**{method: partial(moved, method) for method in MOVES}, "eq": operator.eq, "ne": operator.ne},
)
