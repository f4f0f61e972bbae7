"""Operands of sums of products with a letter for each dim of their logical shape, and what the letters say.

    "bld,bde->ble"    b the batch, l ragged, d and e static

The letter at the batch dim is the batch letter, those at ragged dims are ragged letters; each is of one kind in all
operands.

Invariant: `check_letters` compares what can be known of sizes; the others are compared as the graph runs.
"""

from __future__ import annotations

import string
from typing import Any, NamedTuple

from torch import Tensor

from tdc.core.asserts import require
from tdc.core.dynamo import known
from tdc.core.errors import ShapeError, StructureError, describe, message
from tdc.core.typing import Op
from tdc.ops.pointwise import mixed
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import is_ragged, ragged_sizes


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
