"""Rows of operations that take sizes or orders of dims, and of those that join examples with others.

    example    x.reshape(x.size(0), 8, -1)      x.permute(1, 0)      torch.cat([xs, h[None]])
    batch      x.reshape(B, -1, 8, D // 8)      x.permute(0, 2, 1)   torch.cat([xs, h (B, 1, D)], 1)

The size of a ragged dim is a number of each example, or -1. An assertion compares it with the size of the dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tdc.autobatch.per_example.table import (
    behind,
    count_of,
    flattened,
    is_own,
    of_rank,
    one_by_one,
    only_shared,
    put,
    ragged,
    rank,
    refuse,
    with_batch,
)
from tdc.autobatch.values import Lane, lane_of
from tdc.core.arguments import normal_dim
from tdc.core.asserts import require
from tdc.core.errors import ShapeError, describe, message
from tdc.core.typing import Op
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import ragged_sizes

SIZE = "x.size(d) of its ragged dim, or -1"
TABLE = "torch.zeros(99, 99), one size for all examples; torch.zeros_like(x @ x.mT) of (T, T)"


def is_size(x: Any) -> bool:
    """True of a size that is a number of each example."""
    return type(x) is Lane and rank(x) == 0


def require_size(op: Any, x: NestedTensor, r: int, size: Lane) -> None:
    """Assert that a size is that of a ragged dim."""
    text = message(op, "the size of a ragged dim", "another number", hint=SIZE)
    require((ragged_sizes(x)[:, r] == size.data).all(), text, ShapeError)


def groups(op: Any, x: NestedTensor, given: list[Any]) -> tuple[list[Any], list[Any]] | None:
    """The sizes before and after the ragged dims; None where a single -1 stands for more than the ragged dim."""
    front, back = statics(x)
    if x.structure.ragged_ndim == 1 and given.count(-1) == 1 and not any([is_size(n) for n in given]):
        at = given.index(-1)
        before, after = given[:at], given[at + 1 :]
        return (before, after) if math.prod(before) == front and math.prod(after) == back else None
    first, end = ragged_places(op, x, given)
    return resolved(op, given[:first], front), resolved(op, given[end:], back)


def ragged_places(op: Any, x: NestedTensor, given: list[Any]) -> tuple[int, int]:
    """The positions where the sizes of the ragged dims begin and end.

    Raises:
        ShapeError: they are not side by side, or not one for each ragged dim.
    """
    at, n = [i for i, size in enumerate(given) if is_size(size)], x.structure.ragged_ndim
    if len(at) != n or at != [*range(at[0], at[0] + n)]:
        got = f"{len(at)} sizes of ragged dims, of {n}"
        hint = TABLE if len(at) > n else SIZE
        raise ShapeError(message(op, "a size for each ragged dim, side by side", got, hint=hint))
    for r, i in enumerate(at):
        require_size(op, x, r, given[i])
    return at[0], at[0] + n


def statics(x: NestedTensor) -> tuple[int, int]:
    """The numbers of elements of static dims before and after the ragged ones."""
    shape, e = x.values.shape, x.structure.packed_dim
    return math.prod(shape[:e]), math.prod(shape[e + 1 :])


def resolved(op: Any, sizes: list[Any], total: int) -> list[Any]:
    """Sizes of static dims without -1, of which there may be one."""
    known = math.prod([n for n in sizes if n != -1])
    free = [n for n in sizes if n == -1]
    if len(free) > 1 or (free and (known == 0 or total % known)) or (not free and known != total):
        got = f"{sizes} for {total} elements"
        raise ShapeError(message(op, "sizes that regroup the static dims of one side", got, hint="x.flatten(a, b)"))
    return [total // known if n == -1 else n for n in sizes]


def reshape(input: Any, given: list[Any]) -> Any:
    """`reshape` and `view`."""
    x = ragged(input, torch.reshape)
    if len(given) == 1 and isinstance(given[0], torch.dtype):
        refuse("x.view(dtype)", "x.to(dtype) converts")
    found = groups("reshape", x, given)
    if found is None:
        return merged(x, given)
    before, after = found
    e, v = x.structure.packed_dim, x.values
    values = v.reshape(*before, v.shape[e], *after)
    return build_nested(x.structure.moved(len(before), 0), values)


def merged(x: NestedTensor, given: list[Any]) -> NestedTensor:
    """The ragged dim together with static ones, as a longer ragged dim: `x.reshape(-1, 4)` of examples (T, 8)."""
    at = given.index(-1)
    before, after = given[:at], given[at + 1 :]
    (front, back), inner = statics(x), math.prod(after)
    if inner == 0 or back % inner or math.prod(before) not in (1, front):
        got = f"{given} for {describe(x)}"
        raise ShapeError(message("reshape", "sizes that keep rows together", got, hint="x.flatten(a, b) joins dims"))
    e, v = x.structure.packed_dim, x.values
    whole = v.reshape(front, v.shape[e], back // inner, inner)
    y = build_nested(x.structure.moved(1, 0), whole)
    y = flattened(y, 0 if math.prod(before) != front else 1, 2)
    e = y.structure.packed_dim
    return build_nested(y.structure.moved(len(before), 0), y.values.reshape(*before, y.values.shape[e], *after))


def flatten(input: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    x = ragged(input, torch.flatten)
    n = rank(x)
    first, last = normal_dim(start_dim, n, "flatten"), normal_dim(end_dim, n, "flatten")
    own = [d - 1 for d in x.ragged_dims]
    inside = [d for d in own if first <= d <= last]
    if not inside:
        return torch.flatten(x, first + 1, last + 1)
    if len(inside) < len(own):
        refuse("one of several ragged dims in torch.flatten", "flatten all of them")
    return flattened(x, first, last)


def expand(input: Any, given: list[Any]) -> Any:
    """`expand` and `broadcast_to`."""
    x = ragged(input, torch.Tensor.expand)
    if len(given) < rank(x):
        got = f"{len(given)} for {rank(x)} dims"
        raise ShapeError(message("expand", "a size for each dim", got, hint="-1 for a dim that stays"))
    y = of_rank(x, len(given))
    own = [d - 1 for d in y.ragged_dims]
    for r, d in enumerate(own):
        if is_size(given[d]):
            require_size("expand", x, r, given[d])
            given[d] = -1
        elif given[d] != -1:
            raise ShapeError(message("expand", SIZE, f"{given[d]}", hint="-1 for a dim that stays"))
    only_shared(torch.Tensor.expand, given)
    return y.expand(-1, *given)


def like_other(input: Any, other: Any) -> Any:
    """`expand_as`, of a dense tensor as well."""
    y = other
    if not isinstance(other, NestedTensor):
        refuse("x.expand_as(h) of a dense h", "x.expand(sizes)")
    if isinstance(input, NestedTensor):
        return of_rank(input, rank(y)).expand_as(y)
    dense = of_rank(input, rank(y))
    return torch.where(torch.ones_like(y, dtype=torch.bool), dense, dense.new_zeros(()))


def view_as(input: Any, other: Any) -> Any:
    return ragged(input, torch.Tensor.view_as).view_as(ragged(other, torch.Tensor.view_as))


def permute(input: Any, order: list[Any]) -> Any:
    if len(order) != rank(input):
        got = f"{len(order)} for {rank(input)} dims"
        raise ShapeError(message("permute", "each dim once", got, hint="count dims of one example"))
    return torch.permute(ragged(input, torch.permute), (0, *behind("permute", order, rank(input))))


def turn(input: Any) -> Any:
    """`t`: of a vector itself."""
    if rank(input) > 2:
        got = f"{rank(input)} dims"
        raise ShapeError(message("t", "a matrix or a vector", got, hint="x.transpose(a, b)"))
    return ragged(input, torch.t) if rank(input) == 1 else torch.transpose(input, 1, 2)


def unsqueeze(input: Any, dim: int) -> Any:
    return torch.unsqueeze(ragged(input, torch.unsqueeze), normal_dim(dim, rank(input) + 1, "unsqueeze") + 1)


def squeeze(input: Any, dim: Any = None) -> Any:
    """`squeeze` of given dims: without them a ragged dim of length 1 would go as well."""
    if dim is None:
        refuse("torch.squeeze without a dim", "name the dim: x.squeeze(1)")
    return torch.squeeze(ragged(input, torch.squeeze), behind("squeeze", dim, rank(input)))


def repeat(op: Any) -> Op:
    """A row for `repeat` and `tile`."""

    def run(input: Any, given: list[Any]) -> Any:
        only_shared(op, given)
        x = of_rank(ragged(input, op), len(given))
        given = [1] * (rank(x) - len(given)) + given if op is torch.tile else given
        if len(given) < rank(x):
            got = f"{len(given)} for {rank(x)} dims"
            raise ShapeError(message(op, "a number for each dim", got, hint="torch.tile adds what is missing"))
        return x.repeat(1, *given)

    return run


# -- joined


def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    """`cat`; along a ragged dim of dense examples as well."""
    n = max([rank(x) for x in tensors])
    if any([rank(x) != n for x in tensors]):
        got = " and ".join([f"{rank(x)}" for x in tensors])
        expected, hint = "tensors with as many dims as each other", "x.unsqueeze(d)"
        raise ShapeError(message("cat", expected, f"{got} dims", hint=hint))
    count, at = count_of(tensors), behind("cat", dim, n)
    like = next(x for x in tensors if isinstance(x, NestedTensor))
    if at not in like.ragged_dims and not all([isinstance(x, NestedTensor) for x in tensors]):
        refuse("ragged and dense examples joined along another dim", "h.expand_as(xs) makes a dense one ragged")
    return torch.cat([with_batch(x, count) for x in tensors], at)


def stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    n = max([rank(x) for x in tensors])
    if not all([isinstance(x, NestedTensor) for x in tensors]):
        refuse("ragged and dense examples in torch.stack", "h.expand_as(xs) makes a dense one ragged")
    return torch.stack([*tensors], normal_dim(dim, n + 1, "stack") + 1)


def hstack(tensors: Sequence[Any]) -> Any:
    return cat(tensors, 0 if rank(tensors[0]) == 1 else 1)


def vstack(tensors: Sequence[Any]) -> Any:
    return cat([unsqueezed(x) for x in tensors] if rank(tensors[0]) == 1 else tensors, 0)


def unsqueezed(x: Any, dim: int = 0) -> Any:
    """An example with a dim of size 1, the first or, at -1, the last one."""
    at = 1 if dim == 0 and is_own(x) else dim  # behind the batch
    return lane_of(x.data.unsqueeze(at)) if type(x) is Lane else x.unsqueeze(at)


# -- made


def new(name: str) -> Op:
    """A row for `x.new_zeros` and the like, as ragged as `x`."""

    def run(input: Any, *size: Any, **kwargs: Any) -> Any:
        x = ragged(input, getattr(torch.Tensor, name))
        one = isinstance(size[0], (tuple, list))
        given, rest = ([*size[0]], size[1:]) if one else ([*size], ())
        make = getattr(x.values, name)
        s = x.structure
        first, end = ragged_places(name, x, given)
        shape = [*given[:first], x.values.shape[s.packed_dim], *given[end:]]
        return build_nested(s.moved(first, 0), make(shape, *rest, **kwargs))

    return run


OWN: dict[Any, Op] = {
    torch.reshape: one_by_one("shape", reshape), torch.Tensor.view: one_by_one("size", reshape),
    torch.flatten: flatten, torch.ravel: flatten, torch.Tensor.expand: one_by_one("size", expand),
    torch.broadcast_to: one_by_one("size", expand), torch.Tensor.expand_as: like_other, torch.Tensor.view_as: view_as,
    torch.Tensor.reshape_as: view_as, torch.permute: one_by_one("dims", permute), torch.t: turn,
    torch.unsqueeze: unsqueeze, torch.squeeze: squeeze,
    torch.Tensor.repeat: one_by_one("repeats", repeat(torch.Tensor.repeat)),
    torch.tile: one_by_one("dims", repeat(torch.tile)),
    torch.cat: cat, torch.stack: stack, torch.hstack: hstack, torch.vstack: vstack,
    **{getattr(torch.Tensor, name): new(name) for name in ("new_zeros", "new_ones", "new_empty", "new_full")},
}  # fmt: skip

for _op, _row in OWN.items():
    put(_op, _row)
