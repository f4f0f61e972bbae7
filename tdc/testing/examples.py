"""Examples of a function, and batches of them: what each is given, and what several at once are.

An argument is a tree. Each leaf is a `Slot`, with what every example has there and how a batch holds it: tensors of one
shape are stacked, tensors of different sizes are packed, or padded with what nobody may read, and the rest is shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tdc.core import pytree
from tdc.core.dynamo import mark_dynamic
from tdc.core.errors import DtypeError, ShapeError, StructureError, describe, message
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.storage import is_ragged
from tdc.testing.batches import Ragged, build_masked, build_nested, unbuild

OP = "testing.assert_batched_equal"
SHARED = "None in in_dims for what all examples share, a 0-d tensor for a number of each example"


def is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


@dataclass(frozen=True)
class Slot:
    """One leaf of the arguments.

    Attributes:
        name: its key path, with the name of the argument in front.
        column: what each example has.
        dim: where a batch counts its examples; None for what all share.
        ragged: the dims of a batch in which examples differ in size.
    """

    name: str
    column: list[Any]
    dim: int | None
    ragged: tuple[int, ...] = ()

    def joined(self, members: Sequence[int], padded: bool) -> Any:
        """What a batch of some examples has."""
        if self.dim is None:
            return self.column[0]
        rows = [self.column[i] for i in members]
        if self.ragged:
            both = Ragged(rows, self.ragged, slack=2)
            return build_masked(both) if padded else build_nested(both)
        return torch.stack(rows, self.dim)


@dataclass
class Given:
    """The arguments of one call, and the leaves of autograd among them.

    Attributes:
        whole: by name, what the batch has; gradients are asked of its `leaves`.
        dims: by name, where its examples are.
    """

    args: list[Any] = field(default_factory=list)
    leaves: dict[str, Tensor] = field(default_factory=dict)
    whole: dict[str, Any] = field(default_factory=dict)
    dims: dict[str, int] = field(default_factory=dict)


class Examples:
    """Examples of a function: `args` of each, where a batch counts them, and what their arguments are called.

    Args:
        grads: whether gradients are asked for.
        ragged: names of the arguments whose examples differ in size, though those at hand may not.

    Raises:
        StructureError: trees of different forms; what has no tensor differs between examples.
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
        """What all examples share, by name."""
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
                if slot.dim is not None and self.grads and is_float(x):
                    x = given.leaves[slot.name] = x.detach().clone().requires_grad_()
                x = x.clone()  # which the function may change in place
            flat.append(x)
        given.args = pytree.tree_unflatten(flat, self.spec)
        return given

    def batch(self, members: Sequence[int], padded: bool, dynamic: bool) -> Given:
        """The arguments of a batch of some examples; `dynamic` says to a graph that their number varies."""
        given = Given()
        flat = []
        for slot in self.slots:
            x: Any = slot.joined(members, padded)
            data = x.data if isinstance(x, MaskedBatch) else x.values if is_ragged(x) else x
            if slot.dim is not None and self.grads and is_float(data):
                data = given.leaves[slot.name] = data.detach().requires_grad_()
                x = with_data(x, data)
                given.whole[slot.name], given.dims[slot.name] = x, slot.dim
            if dynamic and slot.dim is not None and not slot.ragged and len(members) > 1:
                mark_dynamic(data, slot.dim)  # as containers mark their own
            flat.append(x)
        given.args = pytree.tree_unflatten(flat, self.spec)
        return given


def with_data(x: Any, data: Tensor) -> Any:
    """A batch with other numbers."""
    return x.with_data(data) if isinstance(x, MaskedBatch) else x.with_values(data) if is_ragged(x) else data


def spread(x: Any, dim: Any) -> list[Any]:
    """A dim, or a tuple with one for each part of an argument, as one for each leaf."""
    leaves = pytree.tree_leaves(x, is_leaf=is_ragged)
    if isinstance(dim, (tuple, list)):
        if not isinstance(x, (tuple, list)) or len(x) != len(dim):
            hint = "one int, or None, for all of an argument"
            got = f"{len(dim)} for {describe(x)}"
            raise ShapeError(message(OP, "one dim for each part of an argument", got, hint=hint))
        return [d for part, own in zip(x, dim, strict=True) for d in spread(part, own)]
    if dim is not None and (not isinstance(dim, int) or isinstance(dim, bool)):
        hint = "in_dims=0, or one entry for each argument: in_dims=(0, None)"
        raise DtypeError(message(OP, "an int or None in in_dims", describe(dim), hint=hint))
    return [dim if isinstance(leaf, Tensor) or is_ragged(leaf) else None for leaf in leaves]


def slot(name: str, column: list[Any], dim: int | None, grads: bool, ragged: Iterable[str]) -> Slot:
    """One leaf of all examples."""
    first = column[0]
    if dim is None:
        if not all([is_same(x, first) for x in column]):
            wrong = {name: f"{describe(first)} and another"}
            raise StructureError(message(OP, "one value for all examples", "several", wrong, SHARED))
        one = first.detach().requires_grad_() if grads and is_float(first) else first
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
    """Whether two examples have one value."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and not isinstance(a, Tensor) and not is_ragged(a) and bool(a == b)


def shown(path: Any, names: Sequence[str]) -> str:
    """A key path, its first key as the name of an argument."""
    at = path[0].idx
    return f"{names[at] if at < len(names) else f'argument {at}'}{pytree.keystr(path[1:])}"


def rows(x: Any, dim: int = 0) -> list[Tensor]:
    """The examples of a batch, taken apart with plain tensor code."""
    return unbuild(x).rows if is_ragged(x) else list(x.unbind(dim))
