"""ObjectArray: one Python object for each example of a TensorDict, e.g. captions or file names.

The objects are in a tuple, in row-major order, and an int64 tensor of the array's shape holds their positions in it.
torch indexes, reshapes, joins and chooses among positions; the result takes the objects that are there.

Invariants: immutable; an array holds the objects that it shows and no others; eager only, a compiled function leaves
it out.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from math import prod
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from tdc.core.dynamo import traced_for
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
from tdc.core.typing import Op
from tdc.tensordict.leaf import register_leaf

MOVES = (
    "reshape", "view", "permute", "transpose", "movedim", "swapaxes", "flatten", "unflatten", "ravel", "squeeze",
    "unsqueeze", "expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave", "tile", "flip", "fliplr",
    "flipud", "roll", "rot90", "narrow", "select", "diagonal", "unfold", "unbind", "split", "chunk", "tensor_split",
    "index_select", "gather", "take_along_dim", "masked_select",
)  # fmt: skip
NO_LISTS = (str, bytes, Mapping, Set)  # iterable, but one object, or without an order
WRITES = ("where", "index_copy", "scatter")  # the objects of the result are those of two arrays


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
        DtypeError: items that are no sequence of objects, such as text, a mapping or a set.

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
        if isinstance(items, NO_LISTS):
            raise no_objects(items, "ObjectArray(list(x)) for its parts")
        try:
            self._items = tuple(items)
        except TypeError:
            raise no_objects(items, "ObjectArray([x], ()) has no dims") from None
        sizes = [len(self._items)] if shape is None else [shape] if isinstance(shape, int) else shape
        try:
            size = torch.Size(sizes)
        except TypeError:
            hint = "ObjectArray(items, [2, 3])"
            raise DtypeError(message("ObjectArray", "ints as its shape", describe(shape), hint=hint)) from None
        if prod(size) != len(self._items):
            expected, got = f"{prod(size)} objects for shape {show_sizes(size)}", f"{len(self._items)}"
            raise ShapeError(message("ObjectArray", expected, got, hint="leave shape out for one dim"))
        self._positions = numbered(size)

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
            return taken(self._items, self._positions[on_host(index)])
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
        return self._items[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectArray, (self._items, tuple(self.shape))

    def __eq__(self, other: object) -> Any:
        """True where the objects are equal, or equal to one object: a bool tensor of this shape.

        Arrays among the objects are compared as a whole.

        Raises:
            ShapeError: an array of another shape.
        """
        if isinstance(other, ObjectArray) and other.shape != self.shape:
            got = f"{show_sizes(self.shape)} and {show_sizes(other.shape)}"
            raise ShapeError(message("eq", "arrays of one shape", got, hint="index one of them"))
        others = other._items if isinstance(other, ObjectArray) else [other] * len(self._items)
        equal = [same(x, y) for x, y in zip(self._items, others, strict=True)]
        return torch.tensor(equal, dtype=torch.bool).view(self.shape)

    def __ne__(self, other: object) -> Any:
        return ~(self == other)

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"ObjectArray(shape={self.shape})"


def no_objects(items: Any, otherwise: str) -> DtypeError:
    """The error for items that are no list of objects."""
    hint = f"ObjectArray([x]); {otherwise}"
    return DtypeError(message("ObjectArray", "a list of objects", describe(items), hint=hint))


def numbered(size: Sequence[int]) -> Tensor:
    """Positions of the elements of a shape, in row-major order."""
    return torch.arange(prod(size), device="cpu").view(size)


def taken(items: Sequence[Any], positions: Any) -> ObjectArray:
    """An ObjectArray of the objects at some positions."""
    out = object.__new__(ObjectArray)
    out._items = tuple([items[i] for i in positions.flatten().tolist()])
    out._positions = numbered(positions.shape)
    return out


def objects(items: tuple[Any, ...], positions: Any) -> Any:
    """Nested lists of positions as nested lists of objects."""
    at: Any = positions
    return [objects(items, p) for p in at] if isinstance(positions, list) else items[at]


@traced_for(taken)
@traced_for(objects)
def refuse_in_graphs(*args: Any) -> NoReturn:
    """Replace in graphs what reads positions, which are data there."""
    got, hint = "one in a graph", "td.exclude(key) before the compiled function; choose objects behind it"
    raise UnsupportedError(message("ObjectArray", "eager code for objects of examples", got, hint=hint))


def on_host(x: Any) -> Any:
    """An index or argument with its tensors in the memory of the host, where positions are."""
    members: Any = x
    if isinstance(x, (list, tuple)):
        return type(members)([on_host(v) for v in members])
    return x.cpu() if isinstance(x, Tensor) else x


def same(x: Any, y: Any) -> bool:
    """True if two objects are equal; arrays have one shape and equal elements, also inside lists, tuples and dicts."""
    a: Any = x
    b: Any = y
    if type(a) is type(b) and isinstance(x, (list, tuple)):
        return len(a) == len(b) and all([i is j or same(i, j) for i, j in zip(a, b, strict=True)])
    if type(a) is type(b) and isinstance(x, dict):
        return a.keys() == b.keys() and all([a[k] is b[k] or same(a[k], b[k]) for k in a])
    if getattr(x, "shape", ()) != getattr(y, "shape", ()):
        return False
    found: Any = x == y
    while getattr(found, "shape", ()) != ():
        found = found.all()
    return bool(found)


def moved(op: Op, *args: Any, **kwargs: Any) -> ObjectArray | tuple[ObjectArray, ...]:
    """A function of tensors that moves elements, applied to positions.

    Positions of one array are behind those of the arrays before it.
    """
    items: list[Any] = []

    def positions(x: Any) -> Any:
        members: Any = x
        if isinstance(x, (list, tuple)):
            return type(members)([positions(v) for v in members])
        if not isinstance(x, ObjectArray):
            return on_host(x)
        start = len(items)
        items.extend(x._items)
        return x._positions + start if start else x._positions

    out = op(*positions(args), **{k: positions(v) for k, v in kwargs.items()})
    return taken(items, out) if isinstance(out, Tensor) else tuple([taken(items, part) for part in out])


def written(name: str, *args: Any, **kwargs: Any) -> ObjectArray:
    """A function of tensors whose result has elements of two, of which none may be a number."""
    if len([x for x in (*args, *kwargs.values()) if isinstance(x, ObjectArray)]) < 2:
        others = [describe(x) for x in (*args, *kwargs.values()) if not isinstance(x, ObjectArray)]
        got, hint = others[-1], "another TensorDict with an ObjectArray there, or td.exclude(key) first"
        raise DtypeError(message(name, "objects from an ObjectArray", got, hint=hint))
    out: Any = moved(getattr(torch, name), *args, **kwargs)
    return out


register_leaf(
    ObjectArray,
    shape=lambda x: x.shape,
    index=lambda x, index: x[index],
    stack=partial(moved, torch.stack),
    cat=partial(moved, torch.cat),
    ops={
        **{name: partial(moved, getattr(Tensor, name)) for name in MOVES},
        **{name: partial(written, name) for name in WRITES},
        "eq": operator.eq, "ne": operator.ne,
    },
)  # fmt: skip
