"""Examples of a function, batches of them, and the tensors that the function captures.

An argument is a tree. Each leaf is a `Slot`, with its value in every example and its form in a batch: tensors of one
shape are stacked, tensors of different sizes are packed, or padded with poison, and the rest is shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tdc.autobatch.decorator import BatchFunction
from tdc.core import pytree
from tdc.core.dtypes import is_inexact
from tdc.core.dynamo import mark_dynamic
from tdc.core.errors import DtypeError, ShapeError, StructureError, describe, message
from tdc.ragged.storage import data_of, is_ragged, with_data
from tdc.testing.batches import Ragged, build_masked, build_nested, unbuild

LIBRARIES = ("torch", "tdc", "numpy")
OP = "testing.assert_batched_equal"
SHARED = "None in in_dims for what all examples share, a 0-d tensor for a number of each example"


@dataclass(frozen=True)
class Slot:
    """One leaf of the arguments.

    Attributes:
        name: its key path, with the name of the argument in front.
        column: values of the examples.
        dim: the batch dim; None for a shared value.
        ragged: dims of a batch in which examples differ in size.
    """

    name: str
    column: list[Any]
    dim: int | None
    ragged: tuple[int, ...] = ()

    def joined(self, order: Sequence[int], padded: bool) -> Any:
        """The value in a batch of some examples."""
        if self.dim is None:
            return self.column[0]
        rows = [self.column[i] for i in order]
        if self.ragged:
            both = Ragged(rows, self.ragged, slack=2)
            return build_masked(both) if padded else build_nested(both)
        return torch.stack(rows, self.dim)


@dataclass
class Given:
    """The arguments of one call; by name the leaves to differentiate, the batches of them, and their batch dims."""

    args: list[Any] = field(default_factory=list)
    leaves: dict[str, Tensor] = field(default_factory=dict)
    whole: dict[str, Any] = field(default_factory=dict)
    dims: dict[str, int] = field(default_factory=dict)


class Examples:
    """Examples of a function: their arguments, batch dims, and names of arguments.

    Args:
        grads: compute gradients.
        ragged: names of arguments that are ragged even if all examples have one size.

    Raises:
        StructureError: trees of different forms; shared values that differ between examples.
        ShapeError: `in_dims` does not fit the arguments, or all is shared.
        DtypeError: an entry of `in_dims` is neither an int nor None; an example is a batch.
    """

    def __init__(
        self, args: list[tuple[Any, ...]], in_dims: Any, names: Sequence[str], grads: bool, ragged: Iterable[str] = ()
    ) -> None:
        self.size = len(args)
        self.grads = grads
        self.in_dims = tuple(in_dims) if isinstance(in_dims, (tuple, list)) else (in_dims,) * len(args[0])
        flat = [pytree.tree_flatten(one, is_leaf=is_ragged) for one in args]
        self.spec = flat[0][1]
        for i, (_, spec) in enumerate(flat):
            if spec != self.spec:
                wrong = {"example 0": f"{self.spec}", f"example {i}": f"{spec}"}
                raise StructureError(message(OP, "examples of one form", "others", wrong, "the same keys and lengths"))
        if len(self.in_dims) != len(args[0]):
            got = f"{len(self.in_dims)} for {len(args[0])} arguments"
            raise ShapeError(message(OP, "one entry of in_dims for each argument", got, hint="None for no dim"))
        dims = [d for x, dim in zip(args[0], self.in_dims, strict=True) for d in spread(x, dim)]
        paths = [path for path, _ in pytree.tree_flatten_with_path(args[0], is_leaf=is_ragged)[0]]
        columns = zip(*[leaves for leaves, _ in flat], strict=True)
        self.slots = [
            slot(shown(path, names), list(column), dim, grads, ragged)
            for path, column, dim in zip(paths, columns, dims, strict=True)
        ]
        if all([slot.dim is None for slot in self.slots]):
            got, hint = "only what all examples share", "in_dims=0 for tensors of each example"
            raise ShapeError(message(OP, "an argument that differs between examples", got, hint=hint))

    def shared(self) -> dict[str, Any]:
        """Shared values by name."""
        return {slot.name: slot.column[0] for slot in self.slots if slot.dim is None}

    def is_ragged(self) -> bool:
        return any([slot.ragged for slot in self.slots])

    def alone(self, i: int) -> Given:
        """The arguments of one example."""
        given = Given()
        flat = []
        for slot in self.slots:
            x = slot.column[i]
            if isinstance(x, Tensor):
                if slot.dim is not None and self.grads and is_inexact(x):
                    x = given.leaves[slot.name] = x.detach().clone().requires_grad_()
                x = x.clone()  # the function may write into it
            flat.append(x)
        given.args = pytree.tree_unflatten(flat, self.spec)
        return given

    def batch(self, order: Sequence[int], padded: bool, dynamic: bool) -> Given:
        """The arguments of a batch of some examples; `dynamic` marks the batch dim for graphs."""
        given = Given()
        flat = []
        for slot in self.slots:
            x: Any = slot.joined(order, padded)
            data = data_of(x)
            if slot.dim is not None and self.grads and is_inexact(data):
                data = given.leaves[slot.name] = data.detach().requires_grad_()
                x = with_data(x, data)
                given.whole[slot.name], given.dims[slot.name] = x, slot.dim
            if dynamic and slot.dim is not None and not slot.ragged and len(order) > 1:
                mark_dynamic(data, slot.dim)  # as containers mark their own
            flat.append(x)
        given.args = pytree.tree_unflatten(flat, self.spec)
        return given


def spread(x: Any, dim: Any) -> list[Any]:
    """Spread a dim, or a tuple of dims for the parts of an argument, over the leaves."""
    leaves = pytree.tree_leaves(x, is_leaf=is_ragged)
    if isinstance(dim, (tuple, list)):
        if not isinstance(x, (tuple, list)) or len(x) != len(dim):
            got, hint = f"{len(dim)} for {describe(x)}", "one int, or None, for all of an argument"
            raise ShapeError(message(OP, "one dim for each part of an argument", got, hint=hint))
        return [d for part, own in zip(x, dim, strict=True) for d in spread(part, own)]
    if dim is not None and (not isinstance(dim, int) or isinstance(dim, bool)):
        hint = "in_dims=0, or one entry for each argument: in_dims=(0, None)"
        raise DtypeError(message(OP, "an int or None in in_dims", describe(dim), hint=hint))
    return [dim if isinstance(leaf, Tensor) or is_ragged(leaf) else None for leaf in leaves]


def slot(name: str, column: list[Any], dim: int | None, grads: bool, ragged: Iterable[str]) -> Slot:
    """The slot of one leaf."""
    first = column[0]
    if dim is None:
        if not all([is_same(x, first) for x in column]):
            wrong = {name: f"{describe(first)} and another"}
            raise StructureError(message(OP, "one value for all examples", "several", wrong, SHARED))
        one = first.detach().requires_grad_() if grads and is_inexact(first) else first
        return Slot(name, [one] * len(column), None)
    wrong = {f"{name} of example {i}": describe(x) for i, x in enumerate(column) if not isinstance(x, Tensor)}
    if wrong:
        hint = "give the examples as they are, and not batches of them"
        raise DtypeError(message(OP, "tensors of one example", "others", wrong, hint))
    if any([x.ndim != first.ndim for x in column]):
        wrong = {f"{name} of example {i}": describe(x) for i, x in enumerate(column)}
        raise ShapeError(message(OP, "tensors with one number of dims", "others", wrong, "unsqueeze the others"))
    if not -first.ndim - 1 <= dim <= first.ndim:
        got, hint = f"in_dims={dim} for {describe(first)}", "the dim of the batch that counts its examples"
        raise ShapeError(message(OP, f"a dim of a batch of {name}", got, hint=hint))
    differ = [d + 1 for d in range(first.ndim) if any([x.shape[d] != first.shape[d] for x in column])]
    if not differ and name in ragged:
        differ = [1]
    return Slot(name, column, dim, tuple(differ))


def is_same(a: Any, b: Any) -> bool:
    """True if two examples have equal values."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and not isinstance(a, Tensor) and not is_ragged(a) and bool(a == b)


def shown(path: Any, names: Sequence[str]) -> str:
    """A key path that begins with the name of the argument."""
    at = path[0].idx
    return f"{names[at] if at < len(names) else f'argument {at}'}{pytree.keystr(path[1:])}"


def rows(x: Any, dim: int = 0) -> list[Tensor]:
    """Split a batch into examples with plain tensor code."""
    return unbuild(x).rows if is_ragged(x) else list(x.unbind(dim))


# -- captured tensors


def captured(name: str, x: Any) -> dict[str, Tensor]:
    """Tensors that require grad and that `x` reaches, by name.

    A function reaches its closure, globals, defaults and object, a module its parameters, and so on recursively.
    """
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    waiting = [(name, x)]
    while waiting:
        name, x = waiting.pop(0)
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, Tensor):
            if x.requires_grad:
                found[name if name not in found else f"{name} of {len(found)}"] = x
        else:
            waiting += parts(name, x)
    return found


def parts(name: str, x: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a value with their names."""
    if isinstance(x, nn.Module):
        yield from [(joined(name, own), p) for own, p in x.named_parameters()]
        yield from [(joined(name, own), m.forward) for own, m in x.named_modules()]
    elif isinstance(x, BatchFunction):
        yield from [(name, x.fn), ("", x.owner)]
    elif isinstance(x, MethodType):
        yield from [(name, x.__func__), ("", x.__self__)]
    elif isinstance(x, partial):
        yield from [(name, part) for part in (x.func, *x.args, *x.keywords.values())]
    elif isinstance(x, FunctionType):
        if (x.__module__ or "").partition(".")[0] not in LIBRARIES:
            yield from names_of(x)
    elif isinstance(x, (tuple, list, dict)):
        leaves = pytree.tree_flatten_with_path(x)[0]
        yield from [(f"{name}{pytree.keystr(path)}", leaf) for path, leaf in leaves]
    elif hasattr(x, "__dict__") and type(x).__module__.partition(".")[0] not in (*LIBRARIES, "builtins"):
        yield from [(joined(name, own), part) for own, part in vars(x).items()]


def joined(name: str, own: str) -> str:
    return f"{name}.{own}" if name and own else name or own


def names_of(fn: FunctionType) -> Iterator[tuple[str, Any]]:
    """Closure, globals and defaults of a function."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # not yet assigned
    yield from [(name, fn.__globals__[name]) for name in every_name(fn.__code__) if name in fn.__globals__]
    yield from [(f"a default of {fn.__name__}", x) for x in fn.__defaults__ or ()]
    yield from (fn.__kwdefaults__ or {}).items()


def every_name(code: CodeType) -> list[str]:
    """Names of globals and attributes in code, and in the code inside it."""
    inner = [name for part in code.co_consts if isinstance(part, CodeType) for name in every_name(part)]
    return [*code.co_names, *inner]
