"""Sums of products over named dims: `torch.einsum` of ragged batches, and what every matrix product runs on.

    "bld,de->ble"   weights of all examples       on packed values
    "bld,bld->bd"   over the ragged dim           on packed values, then example by example
    "bld,bde->ble"  weights of each example       in a rectangle
    "bld,bmd->blm"  ragged by ragged              likewise; two ragged dims come back
    "bld,ble->bde"  outer products, summed        likewise

A letter names a dim of the logical shape. Packed values are used where the product of one position is no larger than
its factors or the result; elsewhere operands are padded, multiplied and packed again.

Invariants: padding is 0 and meets 0 only, so NaN and infinities of one example stay there; a ragged letter keeps its
batch letter; nothing is read on the host but the number of elements of a result with new ragged dims.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.core.errors import DtypeError, message
from tdc.core.rules import define
from tdc.core.typing import Op
from tdc.layout.padding import pack_rows, pad_rows
from tdc.layout.segments import (
    counts_on_host,
    longest_at_least,
    reduce_rows,
    sizes_on_host,
    spread,
    structure_of_sizes,
    total_of,
)
from tdc.layout.structure import Structure, remember, require_same
from tdc.ops.letters import (
    Term,
    check_letters,
    check_result,
    joined,
    kinds_of,
    parse,
    ragged_of,
    sizes_by_letter,
    without_ones,
)
from tdc.ops.rectangle import cut_padding
from tdc.ragged.masked import MaskedBatch, build_masked, in_rectangle
from tdc.ragged.nested import build_nested
from tdc.ragged.storage import Ragged, is_ragged

Run = Callable[[list[Term], str], Tensor]


def einsum(equation: str, *operands: Any) -> Ragged | Tensor:
    """`torch.einsum`, operands taken from left to right, two at a time."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):  # Dynamo hands a list on as it is (2.11-2.13)
        operands = tuple(operands[0])
    terms, out = parse(equation, operands)
    while len(terms) > 2:
        first, second, *rest = terms
        terms = [join(first, second, out + joined(rest)), *rest]
    return contract(torch.einsum, terms, out)


def join(a: Term, b: Term, needed: str) -> Term:
    """Two operands as one, with the letters that are needed later: batch, ragged, then the others."""
    ragged, batch = kinds_of(torch.einsum, [t for t in (a, b) if is_ragged(t.x)])
    found = [c for c in dict.fromkeys(a.dims + b.dims) if c in needed]
    kept = [c for c in found if c in ragged]
    head = [batch] if kept or batch in found else []
    dims = "".join([*head, *kept, *[c for c in found if c not in kept and c != batch]])
    return Term(dims, contract(torch.einsum, [a, b], dims))


# -- the engine


def contract(op: Op, terms: list[Term], out: str, exact: str = "") -> Ragged | Tensor:
    """The sum over all letters that `out` lacks of the product of one or two operands.

    Args:
        exact: letters of which size 1 does not broadcast.

    Returns:
        A batch where a ragged letter is in `out`, else a dense tensor; dims in the order of `out`.

    Raises:
        ShapeError: sizes of one letter differ; a ragged letter is lost from its batch letter, or from its neighbour.
        StructureError: one letter is ragged here and static there, or lengths differ.
        UnsupportedError: a NestedTensor meets a MaskedBatch.
        DtypeError: a sum of products of bools, which torch has none of.
    """
    if any([c not in out for t in terms for c in t.dims]):
        terms = summable(op, terms)
    batches = [t for t in terms if is_ragged(t.x)]
    ragged, batch = kinds_of(op, batches)
    terms = [t if is_ragged(t.x) else without_ones(t, ragged + batch, exact) for t in terms]
    check_letters(op, terms, ragged, batch, exact)
    if len(terms) > 1:
        terms = summed_alone(op, terms, out, ragged)
        batches = [t for t in terms if is_ragged(t.x)]
    if not batches:
        return multiply(terms, out)
    check_result(op, out, ragged, batch)
    return (in_rectangles if isinstance(batches[0].x, MaskedBatch) else of_nested)(op, terms, out, batch)


def summable(op: Op, terms: list[Term]) -> list[Term]:
    """Operands of a sum in the dtype that it has: whole numbers alone are summed as int64, products in their own."""
    dtypes = [t.x.dtype for t in terms]
    if len(terms) > 1 and torch.bool in dtypes:
        raise DtypeError(message(op, "numbers", "bools", hint="x.to(torch.int64)"))
    if len(terms) > 1 or dtypes[0].is_floating_point or dtypes[0].is_complex:
        return terms
    return [Term(t.dims, t.x.to(torch.int64)) for t in terms]


def summed_alone(op: Op, terms: list[Term], out: str, ragged: str) -> list[Term]:
    """Ragged letters that one operand has alone, and the result lacks, are summed there: padding would meet values."""
    done = []
    for i, t in enumerate(terms):
        needed = out + joined([*terms[:i], *terms[i + 1 :]])
        if is_ragged(t.x) and any([c not in needed for c in ragged_of(t)]):
            left = [c for c in ragged_of(t) if c in needed]
            kept = "".join([c for c in t.dims if (c not in ragged_of(t) if left else False) or c in needed])
            t = Term(kept, contract(op, [t], kept))
        done.append(t)
    return done


# -- packed values


def of_nested(op: Op, terms: list[Term], out: str, batch: str) -> Ragged | Tensor:
    """On packed values where that is no larger than its parts, else in rectangles."""
    batches = [t for t in terms if is_ragged(t.x)]
    letters = ragged_of(batches[0])
    kept = letters in out.replace(batch, "")
    if any([ragged_of(t) != letters for t in batches]) or (not kept and any([c in letters for c in out])):
        return in_rectangles(op, terms, out, batch)
    summed, result = batch in out and not kept, set(out) - {batch}
    factors = [set(t.dims) - {batch} for t in batches] + [result] * kept
    each = [t for t in terms if not is_ragged(t.x) and batch in t.dims]
    large = any([not any([set(t.dims) - {batch} <= f for f in factors]) for t in each])
    if large or (summed and not any([result <= set(t.dims) for t in terms])):
        return in_rectangles(op, terms, out, batch)
    s, packed = batches[0].x._structure, next(c for c in string.ascii_letters if c not in out + joined(terms))
    total = batches[0].x._values.shape[s.packed_dim]
    for t in batches[1:]:
        if t.x._structure is not s:  # examples of equal lengths, wherever their axes lie
            require_same(s, t.x._structure.moved(s.packed_dim, s.batch_dim), op)
    ready = [as_packed(t, s, total, batch, letters, packed) for t in terms]
    if summed:
        y = multiply(ready, packed + out.replace(batch, ""))
        return reduce_rows(y, s, "sum", 0).movedim(0, out.index(batch))
    new_out = in_packed(out, letters, batch, packed)
    y = multiply(ready, new_out)
    return build_nested(s.moved(new_out.index(packed), out.index(batch)), y) if kept else y


def in_packed(dims: str, letters: str, batch: str, packed: str) -> str:
    """Letters of the logical shape as letters of packed values."""
    return dims.replace(batch, "").replace(letters, packed)


def as_packed(t: Term, s: Structure, total: int, batch: str, letters: str, packed: str) -> Term:
    """An operand beside packed values: a batch its own, a dense one as it is, or spread from examples to positions."""
    if is_ragged(t.x):
        return Term(in_packed(t.dims, letters, batch, packed), t.x._values)
    if batch not in t.dims:
        return t
    return Term(packed + t.dims.replace(batch, ""), spread(t.x.movedim(t.dims.index(batch), 0), s, total))


# -- padded


class Bound(NamedTuple):
    """The longest size along a ragged letter, and the structure that says so."""

    size: int
    extent: Tensor | None
    column: int


def multiply(terms: list[Term], out: str) -> Tensor:
    return torch.einsum(",".join([t.dims for t in terms]) + "->" + out, *[t.x for t in terms])


def in_rectangles(op: Op, terms: list[Term], out: str, batch: str, run: Run = multiply) -> Ragged | Tensor:
    """Pad operands with 0, multiply them by `run`, and return the result in the layout of the batches."""
    batches = [t for t in terms if is_ragged(t.x)]
    sizes = sizes_by_letter(op, batches)
    kept = "".join([c for c in out if c in sizes])
    owner = next((t.x for t in batches if ragged_of(t) == kept), None)
    if isinstance(batches[0].x, MaskedBatch):
        y = run([alike_padded(t, batches) if is_ragged(t.x) else t for t in terms], out)
        if not kept:
            return y
        lengths = torch.stack([sizes[c] for c in kept], 1) if owner is None else owner.lengths
        at = tuple([out.index(c) for c in kept])
        return cut_padding(build_masked(y, lengths, at, out.index(batch), new_lengths=owner is None), y)
    bounds = bounds_of(batches)
    ready = [as_padded(t, bounds, batch) if is_ragged(t.x) else t for t in terms]
    if not kept:
        return run(ready, out)
    y = run(ready, batch + kept + "".join([c for c in out if c not in kept and c != batch]))
    s, total = result_structure(kept, owner, sizes, bounds, batches)
    at = out.replace(batch, "").index(kept[0])
    return build_nested(s.moved(at, out.index(batch)), pack_rows(y, s, total).movedim(0, at))


def alike_padded(t: Term, batches: list[Term]) -> Term:
    """A padded batch, 0 in padding, whose ragged letters have the sizes that the first operand with them has."""
    sizes = {c: n for dims, x in reversed(batches) for c, n in zip(dims, x.data.shape, strict=True)}
    return Term(t.dims, in_rectangle(t.x, [sizes[c] for c in ragged_of(t)]).filled(0))


def bounds_of(batches: list[Term]) -> dict[str, Bound]:
    """The bound of each ragged letter, of the first operand that has it."""
    bounds: dict[str, Bound] = {}
    for t in batches:
        s: Structure = t.x._structure
        found = longest_at_least(s, (2,) * s.ragged_ndim)  # Inductor asks of products whether a size is 1
        for r, (c, n) in enumerate(zip(ragged_of(t), found, strict=True)):
            bounds.setdefault(c, Bound(n, s.extent, r))
    return bounds


def result_structure(
    kept: str, owner: Any, sizes: dict[str, Tensor], bounds: dict[str, Bound], batches: list[Term]
) -> tuple[Structure, int]:
    """The structure of a result with ragged letters, and its packed size: those of the operand that has the letters, or
    new ones."""
    if owner is not None:
        return owner._structure, owner._values.shape[owner._structure.packed_dim]
    s = structure_of_sizes(torch.stack([sizes[c] for c in kept], 1), tuple([bounds[c].size for c in kept]))
    if counts_on_host(s):
        columns = {c: sizes_on_host(t.x._structure)[:, r] for t in batches for r, c in enumerate(ragged_of(t))}
        remember(sizes_on_host, s, torch.stack([columns[c] for c in kept], 1))
    return s, total_of(s)


def as_padded(t: Term, bounds: dict[str, Bound], batch: str) -> Term:
    """A batch as a rectangle (batch, ragged dims, others), 0 where there is nothing.

    Operands that share a letter get the rectangle of the first; their lengths are equal, their bounds may differ.
    """
    s, letters = t.x._structure, ragged_of(t)
    found = [bounds[c] for c in letters]
    foreign = any([b.extent is not s.extent or b.column != r for r, b in enumerate(found)])
    data = pad_rows(t.x._values.movedim(s.packed_dim, 0), s, tuple([b.size for b in found]), cut=foreign)
    return Term(batch + letters + "".join([c for c in t.dims if c not in letters and c != batch]), data)


define(torch.einsum, "einsum", ragged=einsum)
