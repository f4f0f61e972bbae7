"""Sums of products over named dims: `torch.einsum` of ragged batches, and what every matrix product runs on.

    "bld,de->ble"   weights of all examples       on packed values
    "bld,bld->bd"   over the ragged dim           on packed values, then example by example
    "bld,bde->ble"  weights of each example       in a rectangle
    "bld,bmd->blm"  ragged by ragged              likewise; two ragged dims come back
    "bld,ble->bde"  outer products, summed        likewise
    "bqd,ckd->bqc"  all pairs of two batches      one is summed over its ragged dim, the other stays ragged or is, too

A letter names a dim of the logical shape: the batch letter, a ragged one or a static one, of one kind in all operands.
Packed values are used where the product of one position is no larger than its factors or the result; elsewhere
operands are padded, multiplied and packed again.

Invariants: padding is 0 and meets 0 only, so NaN and infinities of one example stay there; a ragged letter keeps its
batch letter; nothing is read on the host but the number of elements of a result with new ragged dims.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.core.asserts import require
from tdc.core.dtypes import as_autocast
from tdc.core.dynamo import known
from tdc.core.errors import DtypeError, ShapeError, StructureError, describe, message
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
from tdc.ops.elementwise.pointwise import mixed
from tdc.ops.rectangle import cut_padding
from tdc.ragged.masked import MaskedBatch, build_masked, in_rectangle
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import Ragged, is_ragged, ragged_sizes

# -- letters


class Term(NamedTuple):
    """An operand with one letter for each dim of its logical shape."""

    dims: str
    x: Any


def parse(equation: str, operands: tuple[Any, ...]) -> tuple[list[Term], str]:
    """Operands with their letters, and the letters of the result; a ShapeError for what is no such equation."""
    left, arrow, out = equation.replace(" ", "").partition("->")
    inputs = left.split(",")
    if len(inputs) != len(operands):
        got = f"{len(inputs)} in {equation!r} for {len(operands)} operands"
        raise ShapeError(message("einsum", "one group of letters for each operand", got, hint="part them with commas"))
    widths = [x.ndim - len(dims.replace("...", "")) for dims, x in zip(inputs, operands, strict=True)]
    wrong = {
        f"operand {i}, {dims!r}": describe(x)
        for i, (n, dims, x) in enumerate(zip(widths, inputs, operands, strict=True))
        if n < 0 or (n > 0 and "..." not in dims)
    }
    if wrong:
        hint = "letters speak of the logical shape: the batch and ragged dims count"
        raise ShapeError(message("einsum", "one letter for each dim", f"{equation!r}", wrong, hint))
    most = max(widths, default=0)
    dots = "".join([c for c in string.ascii_letters if c not in equation][:most])
    named = [dims.replace("...", dots[most - n :]) for dims, n in zip(inputs, widths, strict=True)]
    letters = "".join(named)
    if not arrow:
        out = dots + "".join([c for c in sorted(set(letters)) if c not in dots and letters.count(c) == 1])
    out = out.replace("...", dots)
    odd = [c for c in letters + out if c not in string.ascii_letters]
    if odd or len(set(out)) < len(out) or not set(out) <= set(letters):
        hint = "letters of the result are letters of operands, each once"
        raise ShapeError(message("einsum", "an equation such as 'bld,de->ble'", f"{equation!r}", hint=hint))
    return [Term(dims, x) for dims, x in zip(named, operands, strict=True)], out


def joined(terms: list[Term]) -> str:
    """The letters of all operands."""
    return "".join([t.dims for t in terms])


def ragged_of(t: Term) -> str:
    """The ragged letters of a batch."""
    return "".join([t.dims[d] for d in t.x.ragged_dims])


def listed(terms: list[Term]) -> dict[str, str]:
    """Operands with their letters, for a message."""
    return {f"operand {i}, {t.dims!r}": describe(t.x) for i, t in enumerate(terms)}


def kinds_of(op: Op, batches: list[Term]) -> tuple[str, str]:
    """All ragged letters, and the batch letter."""
    if not batches:
        return "", ""
    first = batches[0].x
    for t in batches[1:]:
        if type(t.x) is not type(first):
            raise mixed(op, first, t.x)
    letters = [t.dims[t.x._batch_dim] for t in batches]
    ragged = "".join(dict.fromkeys("".join([ragged_of(t) for t in batches])))
    if len(set(letters)) > 1 or letters[0] in ragged:
        got = " and ".join([repr(letter) for letter in dict.fromkeys(letters)])
        hint = "name the batch dims by one letter, as in 'bld,bmd->blm'"
        raise StructureError(message(op, "one letter for the batch", got, listed(batches), hint))
    return ragged, letters[0]


def without_ones(t: Term, letters: str, exact: str) -> Term:
    """A dense operand without those of its dims that only broadcast over examples and their positions."""
    x, dims = t.x, t.dims
    for c in [c for c in letters if c not in exact]:
        while c in dims and known(x.shape[dims.index(c)] == 1):
            x, dims = x.select(dims.index(c), 0), dims.replace(c, "", 1)
    return Term(dims, x)


def check_letters(op: Op, terms: list[Term], ragged: str, batch: str, exact: str) -> None:
    """Every letter has one kind and one size."""
    sizes: dict[str, Any] = {}
    for t in terms:
        own = ragged_of(t) if is_ragged(t.x) else ""
        wrong = [c for c in ragged if c in t.dims and c not in own]
        twice = [c for c in own + batch if t.dims.count(c) > 1]
        if wrong or twice:
            got = f"{t.dims!r} for {describe(t.x)}"
            expected, hint = f"letter {[*twice, *wrong][0]!r} once in an operand", "x.diagonal(0, 1, 2) of a pair map"
            if wrong:
                expected = f"letter {wrong[0]!r} on ragged dims only"
                hint = "pack that operand along the same dim, or pad the batch with x.to_padded()"
            raise StructureError(message(op, expected, got, hint=hint))
        for c, n in zip(t.dims, t.x.shape, strict=True):
            if c in own:
                continue
            size = sizes.setdefault(c, n)
            if known(size != n) and (c in exact or (size != 1 and n != 1)):
                hint = "a dim that two operands share, as summed and batch dims are, has one size"
                raise ShapeError(message(op, f"one size for dim {c!r}", f"{size} and {n}", listed(terms), hint))
            sizes[c] = n if known(size == 1) else size


def check_result(op: Op, out: str, ragged: str, batch: str) -> None:
    """A result has its ragged dims side by side, and the batch they belong to."""
    at = [i for i, c in enumerate(out) if c in ragged]
    if at and batch not in out:
        hint = "sum over the ragged dim as well, or keep the batch dim"
        raise ShapeError(message(op, f"ragged dims with the batch, {batch!r}", f"a result {out!r}", hint=hint))
    if at and [c for c in out[at[0] : at[-1] + 1] if c != batch] != [out[i] for i in at]:
        got, hint = f"a result {out!r}", "name ragged dims next to each other"
        raise ShapeError(message(op, "ragged dims side by side", got, hint=hint))


def sizes_by_letter(op: Op, batches: list[Term]) -> dict[str, Tensor]:
    """The sizes that examples have along each ragged letter, (B,); equal in all operands that have it."""
    found: dict[str, tuple[Tensor, Any, int]] = {}
    text = message(op, "rows of equal lengths", "others", hint="build both from one structure, e.g. x.with_values(y)")
    for t in batches:
        sizes = ragged_sizes(t.x)
        source = t.x._structure.offsets if isinstance(t.x, NestedTensor) else sizes
        for r, c in enumerate(ragged_of(t)):
            first, other, column = found.setdefault(c, (sizes[:, r], source, r))
            if other is not source or column != r:
                require((first == sizes[:, r]).all(), text)
    return {c: column for c, (column, _, _) in found.items()}


Run = Callable[[list[Term], str], Tensor]


# -- sums of products


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


def contract(op: Op, terms: list[Term], out: str, exact: str = "") -> Ragged | Tensor:
    """The sum over all letters that `out` lacks of the product of one or two operands, dims in the order of `out`.

    A batch where a ragged letter is in `out`, else a dense tensor. Letters in `exact` do not broadcast from size 1.
    """
    if len(terms) > 1 and any([c in terms[1].dims and c not in out for c in terms[0].dims]):  # as torch.bmm
        terms = [Term(t.dims, x) for t, x in zip(terms, as_autocast(*[t.x for t in terms]), strict=True)]
    if any([c not in out for t in terms for c in t.dims]):
        terms = summable(op, terms)
    terms = across_batches(op, terms, out)
    batches = [t for t in terms if is_ragged(t.x)]
    ragged, batch = kinds_of(op, batches)
    terms = [t if is_ragged(t.x) else without_ones(t, ragged + batch, exact) for t in terms]
    check_letters(op, terms, ragged, batch, exact)
    if len(terms) > 1:
        terms = summed_alone(op, terms, out)
        batches = [t for t in terms if is_ragged(t.x)]
    if not batches:
        return multiply(terms, out)
    check_result(op, out, ragged, batch)
    return (in_rectangles if isinstance(batches[0].x, MaskedBatch) else of_nested)(op, terms, out, batch)


def across_batches(op: Op, terms: list[Term], out: str) -> list[Term]:
    """Two operands; of two batches, each with its own batch letter, one at most that is still ragged.

    Each is summed by itself over the ragged letters that the result lacks.
    """
    if len(terms) < 2 or not (is_ragged(terms[0].x) and is_ragged(terms[1].x)):
        return terms
    a, b = terms
    letters = [t.dims[t.x._batch_dim] for t in terms]
    if letters[0] == letters[1] or any([c in b.dims for c in ragged_of(a) + letters[0]]) or letters[1] in a.dims:
        return terms
    done = []
    for t in terms:
        kept = "".join([c for c in t.dims if c in out or c not in ragged_of(t)])
        done.append(t if kept == t.dims else Term(kept, contract(op, [t], kept)))
    if is_ragged(done[0].x) and is_ragged(done[1].x):
        hint = "q @ d.values.mT of packed d is (B, -1, N) for its N positions; tdc.ops.max_sim(q, d) is (B, C)"
        expected = "a result that is ragged like one of two batches"
        raise StructureError(message(op, expected, f"{out!r}", listed(terms), hint))
    return done


def summable(op: Op, terms: list[Term]) -> list[Term]:
    """Operands of a sum in the dtype that it has: whole numbers alone are summed as int64, products in their own."""
    dtypes = [t.x.dtype for t in terms]
    if len(terms) > 1 and torch.bool in dtypes:
        raise DtypeError(message(op, "numbers", "bools", hint="x.to(torch.int64)"))
    if len(terms) > 1 or dtypes[0].is_floating_point or dtypes[0].is_complex:
        return terms
    return [Term(t.dims, t.x.to(torch.int64)) for t in terms]


def summed_alone(op: Op, terms: list[Term], out: str) -> list[Term]:
    """Operands without ragged letters that neither the other nor the result has: padding would meet values there."""
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
    new_out = out.replace(batch, "").replace(letters, packed)
    y = multiply(ready, new_out)
    return build_nested(s.moved(new_out.index(packed), out.index(batch)), y) if kept else y


def as_packed(t: Term, s: Structure, total: int, batch: str, letters: str, packed: str) -> Term:
    """An operand beside packed values: a batch its own, a dense one as it is, or spread from examples to positions."""
    if is_ragged(t.x):
        return Term(t.dims.replace(batch, "").replace(letters, packed), t.x._values)
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
        widths = {c: n for dims, x in reversed(batches) for c, n in zip(dims, x.data.shape, strict=True)}

        def alike(t: Term) -> Term:
            """A padded batch, 0 in padding, in a rectangle of the sizes that the first operand with its letters has."""
            return Term(t.dims, in_rectangle(t.x, [widths[c] for c in ragged_of(t)]).filled(0))

        y = run([alike(t) if is_ragged(t.x) else t for t in terms], out)
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
    """The structure and packed total of a result: those of the operand that has its ragged letters, or new ones."""
    if owner is not None:
        return owner._structure, owner._values.shape[owner._structure.packed_dim]
    s = structure_of_sizes(torch.stack([sizes[c] for c in kept], 1), tuple([bounds[c].size for c in kept]))
    if counts_on_host(s):
        columns = {c: sizes_on_host(t.x._structure)[:, r] for t in batches for r, c in enumerate(ragged_of(t))}
        remember(sizes_on_host, s, torch.stack([columns[c] for c in kept], 1))
    return s, total_of(s)


def as_padded(t: Term, bounds: dict[str, Bound], batch: str) -> Term:
    """A batch as a rectangle (batch, ragged dims, others) of the bounds of the first operand with its letters."""
    s, letters = t.x._structure, ragged_of(t)
    found = [bounds[c] for c in letters]
    foreign = any([b.extent is not s.extent or b.column != r for r, b in enumerate(found)])
    data = pad_rows(t.x._values.movedim(s.packed_dim, 0), s, tuple([b.size for b in found]), cut=foreign)
    return Term(batch + letters + "".join([c for c in t.dims if c not in letters and c != batch]), data)


define(torch.einsum, "einsum", ragged=einsum)
