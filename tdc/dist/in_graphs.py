"""Collectives that are traced and have gradients: plain tensor code, the same on all ranks, without a handshake.

Leaves are columns: tensors whose dim 0 is rows of the batch, or packed positions of a ragged leaf. Columns of one
number of rows and one dtype travel as one matrix. Ragged leaves send lengths, from which offsets are made again.

Gradients are those of the sum of all ranks' losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.compile._torch.collectives import exchanged, whole
from tdc.compile.shards import cut, joined
from tdc.core.dynamo import under_transform
from tdc.core.errors import ShapeError, UnsupportedError, describe, message
from tdc.dist.form import BARE, as_td
from tdc.layout.segments import offsets_of, on_host
from tdc.layout.structure import Structure
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import data_of, with_data
from tdc.ragged.two_level import TwoLevelTensor, build_two_level
from tdc.tensordict.leaf import unwrap
from tdc.tensordict.tensordict import TensorDict, build_td

in_transform = under_transform


def records(x: Any) -> bool:
    """True if gradients of a structure are to be recorded, eagerly."""
    if not torch.is_grad_enabled():
        return False
    leaves: Any = x._leaves.values() if isinstance(x, TensorDict) else [x]
    return any([getattr(leaf, "requires_grad", False) for leaf in leaves])


# -- of one size on all ranks


def by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Numbers of the tensors of each dtype."""
    found: dict[torch.dtype, list[int]] = {}
    for i, x in enumerate(tensors):
        found.setdefault(x.dtype, []).append(i)
    return [*found.values()]


def on_flats(tensors: Sequence[Tensor], run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Tensors after a function of all numbers of one dtype, `(n,) -> (n,)`."""
    out = [*tensors]
    for group in by_dtype(tensors):
        own = [tensors[i] for i in group]
        for i, part in zip(group, cut(run(joined(own)), own), strict=True):
            out[i] = kept(tensors[i], part)
    return out


def kept(old: Tensor, new: Tensor) -> Tensor:
    """A result that requires grad only if what it was made of does."""
    return new if old.requires_grad or under_transform() else new.detach()


def on_numbers(op: str, x: Any, run: Callable[[list[Tensor]], list[Tensor]]) -> Any:
    """A structure after a function of the numbers of its leaves."""
    td, bare = as_td(op, x)
    old = [unwrap(leaf) for leaf in td._leaves.values()]
    refuse_objects(op, old)
    new = run([data_of(leaf) for leaf in old])
    leaves = {p: with_data(a, b) for p, a, b in zip(list(td._leaves), old, new, strict=True)}
    return leaves[BARE] if bare else build_td(leaves, td._nodes, td._size, td._device)


def refuse_objects(op: str, leaves: Sequence[Any]) -> None:
    """Refuse leaves that are neither tensors nor ragged batches."""
    wrong = [describe(x) for x in leaves if not isinstance(x, (Tensor, NestedTensor, TwoLevelTensor, MaskedBatch))]
    if wrong:
        hint = "td.exclude(key), or a call without gradients outside of compiled functions"
        raise UnsupportedError(message(op, "tensors and ragged batches", wrong[0], hint=hint))


def reduce_whole(name: str, td: Any, op: str, weight: Any, group: Any) -> Any:
    """`all_reduce`, recorded."""

    def run(tensors: list[Tensor]) -> list[Tensor]:
        if op not in ("sum", "mean"):
            return [extreme(x, op, group) for x in tensors]
        if weight is not None:
            tensors = [x * weight for x in tensors]
        out = on_flats(tensors, lambda x: whole(x, "sum", group))
        if op == "sum":
            return out
        if weight is None:
            return [x / group.size() for x in out]
        own = weight if isinstance(weight, Tensor) else torch.full((), float(weight), device=tensors[0].device)
        total = whole(own.reshape(1), "sum", group).reshape(())
        return [x / total for x in out]

    return on_numbers(name, td, run)


def extreme(x: Tensor, op: str, group: Any) -> Tensor:
    """The largest, smallest or product of the numbers of all ranks, with the gradient of that."""
    all_of = whole(x.reshape(1, -1), "gather", group)
    found = all_of.amax(0) if op == "max" else all_of.amin(0) if op == "min" else all_of.prod(0)
    return found.reshape(x.shape)


def broadcast_whole(op: str, td: Any, src: int, group: Any) -> Any:
    """`broadcast`, recorded."""
    return on_numbers(op, td, lambda tensors: on_flats(tensors, lambda x: whole(x, "from", group, src)))


def scatter_rows(op: str, td: Any, dim: int, group: Any) -> Any:
    """`reduce_scatter` of dense leaves, recorded."""
    whole_td, bare = as_td(op, td)
    world, k = group.size(), len(whole_td._size)
    at = dim % k
    columns = [leaf.movedim(at, 0) for leaf in whole_td._leaves.values()]
    out = on_matrices(columns, [0] * len(columns), lambda x, slot: whole(x, "scatter", group))
    leaves = {p: x.movedim(0, at) for p, x in zip(list(whole_td._leaves), out, strict=True)}
    size = [n // world if d == at else n for d, n in enumerate(whole_td._size)]
    return leaves[BARE] if bare else build_td(leaves, whole_td._nodes, torch.Size(size), whole_td._device)


def on_matrices(columns: Sequence[Tensor], slots: Sequence[int], run: Callable[[Tensor, int], Tensor]) -> list[Tensor]:
    """Columns after a function of a matrix `(n, F)` of all with one number of rows and one dtype."""
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(columns):
        groups.setdefault((slots[i], x.dtype), []).append(i)
    out = [*columns]
    for (slot, _), group in groups.items():
        widths = [prod(columns[i].shape[1:]) for i in group]
        flat = [columns[i].reshape(columns[i].shape[0], n) for i, n in zip(group, widths, strict=True)]
        matrix = run(torch.cat(flat, 1), slot)
        for i, part in zip(group, matrix.split(widths, 1), strict=True):
            out[i] = kept(columns[i], part.reshape(part.shape[0], *columns[i].shape[1:]))
    return out


# -- of any numbers of rows


class Columns(NamedTuple):
    """The columns of all leaves, the number of rows that each has, by slot, and how to make the leaves again."""

    tensors: list[Tensor]
    slots: list[int]
    sizes: list[int]
    makers: list[Callable[[Sequence[Tensor]], Any]]
    counts: list[int]  # of columns of each leaf


def columns_of(op: str, leaves: Sequence[Any], rows: int, dim: int) -> Columns:
    """Leaves as columns."""
    found = Columns([], [], [rows], [], [])
    for given in leaves:
        x = given.to_packed() if isinstance(given, MaskedBatch) else given
        if isinstance(x, Tensor):
            own, make = [(x.movedim(dim, 0), 0)], lambda parts: parts[0].movedim(0, dim)
        elif dim != 0:
            hint = "dim=0, the examples"
            raise ShapeError(message(op, f"dense leaves for dim={dim}", describe(given), hint=hint))
        elif isinstance(x, NestedTensor):
            own, make = nested_columns(x, 0, found.sizes), make_nested(x)
            make = made_padded(make) if isinstance(given, MaskedBatch) else make
        else:
            found.sizes.append(len(x.values))
            own = [(x.lengths, 0), *nested_columns(x.values, len(found.sizes) - 1, found.sizes)]
            make = make_two_level(x)
        found.tensors.extend([t for t, _ in own])
        found.slots.extend([slot for _, slot in own])
        found.makers.append(make)
        found.counts.append(len(own))
    return found


def nested_columns(x: NestedTensor, rows: int, sizes: list[int]) -> list[tuple[Tensor, int]]:
    """Lengths, sizes and values of a ragged leaf, each with its slot."""
    s = x.structure
    sizes.append(x.values.shape[s.packed_dim])
    more = [] if s.shapes is None else [(s.shapes, rows)]
    return [(x.values.movedim(s.packed_dim, 0), len(sizes) - 1), (s.offsets.diff(), rows), *more]


def make_nested(x: NestedTensor) -> Callable[[Sequence[Tensor]], NestedTensor]:
    """Make a ragged leaf of its columns."""
    s = x.structure

    def make(parts: Sequence[Tensor]) -> NestedTensor:
        shapes = parts[2] if len(parts) > 2 else None
        made = Structure(offsets_of(parts[1]), shapes, None, s.packed_dim, s.batch_dim, s.ragged_ndim).marked()
        return build_nested(made, parts[0].movedim(0, s.packed_dim))

    return make


def made_padded(make: Callable[[Sequence[Tensor]], Any]) -> Callable[[Sequence[Tensor]], MaskedBatch]:
    """Make a padded leaf of the columns of its packed one."""
    return lambda parts: make(parts).to_padded()


def make_two_level(x: TwoLevelTensor) -> Callable[[Sequence[Tensor]], TwoLevelTensor]:
    """Make a leaf of two levels of its columns."""
    inner = make_nested(x.values)

    def make(parts: Sequence[Tensor]) -> TwoLevelTensor:
        return build_two_level(Structure(offsets_of(parts[0])).marked(), inner(parts[1:]))

    return make


def leaves_of(columns: Columns, tensors: Sequence[Tensor]) -> list[Any]:
    """The leaves that columns make."""
    found: list[Any] = []
    begin = 0
    for make, n in zip(columns.makers, columns.counts, strict=True):
        found.append(make(tensors[begin : begin + n]))
        begin += n
    return found


def with_own(known: list[list[int]], own: list[int], group: Any) -> list[list[int]]:
    """Sizes of all ranks with those of this one as it knows them, so that a graph sees that there are some rows."""
    return [own if r == group.rank() else row for r, row in enumerate(known)]


def as_tensor(sizes: Sequence[int], like: Tensor) -> Tensor:
    """Sizes as a tensor, (n,) int64."""
    return torch.stack([torch.full((), n, dtype=torch.int64, device=like.device) for n in sizes])


def gather_rows(op: str, td: Any, dim: int | None, even: bool, group: Any) -> tuple[Any, Tensor]:
    """`all_gather`, recorded; and the number of rows of each rank."""
    whole_td, bare = as_td(op, td)
    old = [unwrap(leaf) for leaf in whole_td._leaves.values()]
    refuse_objects(op, old)
    world, k = group.size(), len(whole_td._size)
    if dim is None:
        return stacked(op, whole_td, old, bare, group)
    if not -k <= dim < k:
        raise ShapeError(message(op, f"one of {k} batch dims", f"dim={dim}", hint="dim=None stacks"))
    at = dim % k
    columns = columns_of(op, old, whole_td._size[at], at)
    own = columns.sizes
    if even and len(own) == 1:
        counts = own * world
        numbers = torch.full((world,), own[0], dtype=torch.int64)
        out = on_matrices(columns.tensors, columns.slots, lambda x, slot: whole(x, "gather", group))
    else:
        all_sizes = whole(as_tensor(own, columns.tensors[0]).reshape(1, -1), "gather", group)
        known = with_own(on_host(all_sizes), own, group)
        numbers = all_sizes[:, 0]
        counts = [row[0] for row in known]

        def run(x: Tensor, slot: int) -> Tensor:
            return exchanged(torch.cat([x] * world), [x.shape[0]] * world, [row[slot] for row in known], group)

        out = on_matrices(columns.tensors, columns.slots, run)
    leaves = dict(zip(list(whole_td._leaves), leaves_of(columns, out), strict=True))
    size = [sum(counts) if d == at else n for d, n in enumerate(whole_td._size)]
    return leaves[BARE] if bare else build_td(leaves, whole_td._nodes, torch.Size(size), whole_td._device), numbers


def stacked(op: str, td: TensorDict, leaves: list[Any], bare: bool, group: Any) -> tuple[Any, Tensor]:
    """`all_gather(dim=None)`, recorded."""
    wrong = [describe(x) for x in leaves if not isinstance(x, Tensor)]
    if wrong:
        raise UnsupportedError(message(op, "dense leaves for dim=None", wrong[0], hint="dim=0 joins ragged batches"))
    world = group.size()
    rows = [x.reshape(1, *x.shape) for x in leaves]
    out = on_matrices(rows, [0] * len(rows), lambda x, slot: whole(x, "gather", group))
    found = dict(zip(list(td._leaves), out, strict=True))
    numbers = torch.ones(world, dtype=torch.int64)
    size = torch.Size([world, *td._size])
    return found[BARE] if bare else build_td(found, td._nodes, size, td._device), numbers


def all_to_all_rows(op: str, parts: Sequence[Any], group: Any) -> list[Any]:
    """`all_to_all`, recorded."""
    given = [as_td(op, part) for part in parts]
    first, bare = given[0]
    if not first._size:
        raise ShapeError(message(op, "parts with a batch dim", "none", hint="td.unsqueeze(0)"))
    paths = list(first._leaves)
    columns: list[Columns] = []
    for td, _ in given:
        old = [unwrap(td._leaves[p]) for p in paths]
        refuse_objects(op, old)
        columns.append(columns_of(op, old, td._size[0], 0))
    own = torch.stack([as_tensor(c.sizes, columns[0].tensors[0]) for c in columns])
    ones = [1] * len(columns)
    known = with_own(on_host(exchanged(own, ones, ones, group)), columns[group.rank()].sizes, group)
    cats = [torch.cat([c.tensors[i] for c in columns]) for i in range(len(columns[0].tensors))]

    def run(x: Tensor, slot: int) -> Tensor:
        return exchanged(x, [c.sizes[slot] for c in columns], [row[slot] for row in known], group)

    out = on_matrices(cats, columns[0].slots, run)
    pieces = [x.split([row[slot] for row in known]) for x, slot in zip(out, columns[0].slots, strict=True)]
    found: list[Any] = []
    for r, row in enumerate(known):
        leaves = dict(zip(paths, leaves_of(columns[0], [p[r] for p in pieces]), strict=True))
        size = torch.Size([row[0], *first._size[1:]])
        found.append(leaves[BARE] if bare else build_td(leaves, first._nodes, size, first._device))
    return found
