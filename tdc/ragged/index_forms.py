"""Indices of ragged batches as one entry for each dim, and entries of static dims applied to tensors.

An entry is an int, a slice (whose ends may be tensors, one for each row), or a vector of positions; a mask becomes the
positions where it is True.

Invariants: an index is refused, with an IndexingError or a ShapeError, or means the same as for each row on its own; no
vector of rows is read on the host, except a mask, whose number of rows is data; sizes may be symbols.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tdc.core.arguments import GAP, NEW_DIM, entries_of
from tdc.core.asserts import require
from tdc.core.container import Container
from tdc.core.dynamo import hold, known, traced_for
from tdc.core.errors import IndexingError, describe, describe_index, message, show_size, show_sizes

X = TypeVar("X")
FULL = slice(None)
FARTHEST = 2**62  # a step to which int64 can add the size of a dim
Entry = int | slice | Tensor  # of an index, for one dim; a list or an array stands for the Tensor it becomes
VECTORS = "one vector at a time: x[rows][..., positions]; rows pair only with positions of the ragged dim"


class Span(NamedTuple):
    """A slice whose ends may be tensors in a graph, too: Dynamo reads those of a `slice` (torch 2.11-2.13)."""

    start: Any = None
    stop: Any = None
    step: int | None = None


def as_rows(index: Entry, count: int, device: Any) -> Entry:
    """An index of the batch in one of three forms: an int in [0, count), a slice, or a vector of rows.

    Args:
        index: int, slice, mask `(count,)` or vector of rows; as a list, an array or a tensor.
    """
    if isinstance(index, slice):
        return index
    if isinstance(index, int) and not isinstance(index, bool):
        if known(index < -count) or known(index >= count):
            expected, hint = f"a row in {range_of(count)}", f"the batch has {show_size(count)} rows"
            raise IndexingError(message("index", expected, show_size(index), hint=hint))
        return index if index >= 0 else index + count
    rows = as_vector(index, device)
    if rows is None or rows.ndim > 1 or (rows.dtype == torch.bool and tuple(rows.shape) != (count,)):
        expected = f"an int, a slice, a mask of [{count}] or a vector of rows"
        hint = "rows of different lengths stay in one batch dim: index it with one dim"
        raise IndexingError(message("index", expected, describe_index(index), hint=hint))
    if rows.dtype == torch.bool:
        return rows.nonzero().squeeze(1)
    return rows.to(torch.int64) if rows.ndim else row_at(rows, count)


def range_of(count: int) -> str:
    """The indices of so many positions, as a text."""
    return f"[{show_size(-count)}, {show_size(count - 1)}]"


def row_at(row: Tensor, count: int) -> Any:
    """The row that a number in a tensor names."""
    return as_rows(int(row), count, row.device)


@traced_for(row_at)
def row_at_traced(row: Tensor, count: int) -> Any:
    """Replace `row_at` in graphs, where the number is data: it is checked when the graph runs."""
    row = torch.where(row < 0, row + count, row)
    hint = "x[i] with i in [-len(x), len(x) - 1]"
    text = message("index", "a row of the batch", "a number in a tensor that is out of range", hint=hint)
    require((row >= 0) & (row < count), text, IndexingError)
    found = int(row)
    hold(found >= 0)
    hold(found < count)
    return found


def as_vector(index: Entry | list[Any] | tuple[Any, ...], device: Any) -> Tensor | None:
    """Whole numbers or a mask as a tensor; None where it is neither."""
    if isinstance(index, (bool, str, Container)):
        return None
    given: Any = index
    try:
        if isinstance(index, (list, tuple)):  # `torch.as_tensor` would make constants of numbers in a graph
            found = torch.tensor(given, dtype=None if given else torch.int64, device=device)
        else:
            found = torch.as_tensor(given, device=device)
    except (TypeError, ValueError, RuntimeError):
        return None
    return None if found.is_floating_point() or found.is_complex() else found


def full_index(index: Entry | tuple[Any, ...], shape: Any, batch_dim: int, device: Any) -> tuple[list[Any], list[int]]:
    """One entry for each dim, that of the batch as given; and for each new dim the number of entries before it."""
    given = entries_of(index)
    gaps = [i for i, part in enumerate(given) if isinstance(part, GAP)]
    real = [part for part in given if not isinstance(part, (NEW_DIM, GAP))]
    fill = len(shape) - len(real)
    if fill < 0 or len(gaps) > 1:
        hint = f"the logical shape is {show_sizes(shape)}"
        got = f"{len(real)} of them" if fill < 0 else f"{len(gaps)} times `...`"
        raise IndexingError(message("index", f"at most {len(shape)} indices, `...` once", got, hint=hint))
    parts: list[Any] = []
    new: list[int] = []
    for part in given if gaps else (*given, Ellipsis):
        if isinstance(part, NEW_DIM):
            new.append(len(parts))
        elif isinstance(part, GAP):
            parts += [FULL] * fill
        else:
            d = len(parts)
            parts.append(part if d == batch_dim else as_step(part, d, shape, device))
    return parts, new


def as_step(part: Entry, dim: int, shape: Any, device: Any) -> Entry:
    """An entry of an index behind the batch dim: an int, a slice, or whole numbers of any number of dims."""
    if isinstance(part, slice):
        return part
    other = part.ndim > 0 or part.dtype == torch.bool if isinstance(part, Tensor) else isinstance(part, (bool, list))
    if not other:  # torch 2.11 does not trace that `operator.index` refuses a list
        with contextlib.suppress(TypeError):
            part = as_number(part)
    size = shape[dim]
    if isinstance(part, int) and not isinstance(part, bool):
        if size != -1 and not -size <= part < size:
            expected, hint = f"an index in {range_of(size)} at dim {dim}", f"the logical shape is {show_sizes(shape)}"
            raise IndexingError(message("index", expected, show_size(part), hint=hint))
        return part
    found = as_vector(part, device)
    masked = found is not None and found.dtype == torch.bool
    if found is None or found.ndim == 0 or (masked and (found.ndim > 1 or size == -1)):
        got, hint = f"{describe_index(part)} at dim {dim}", "x[mask] with a mask that is as ragged as x"
        raise IndexingError(message("index", "an int, a slice, positions, or a mask of a static dim", got, hint=hint))
    if masked:
        if found.shape[0] != size:
            expected = f"a mask of [{size}] at dim {dim}"
            raise IndexingError(message("index", expected, describe(found), hint="one entry for each position"))
        return found.nonzero().squeeze(1)
    return found.to(torch.int64)


def check_vectors(parts: list[Any], batch_dim: int, ragged_dims: tuple[int, ...]) -> None:
    """Refuse vectors that would pair up as in NumPy, except rows with positions of the ragged dim."""
    found = [d for d, part in enumerate(parts) if isinstance(part, Tensor)]
    if len(found) > 1 and set(found) != {batch_dim, ragged_dims[0]}:
        raise IndexingError(message("index", "at most one vector", f"vectors at dims {found}", hint=VECTORS))


def around_batch(parts: list[Any], batch_dim: int, ragged_dims: tuple[int, ...]) -> bool:
    """True if vectors index the batch and static dims beside it, in front of the ragged ones."""
    found = [d for d, part in enumerate(parts) if isinstance(part, Tensor)]
    beside = len(found) > 1 and found[-1] - found[0] == len(found) - 1
    return beside and batch_dim in found and found[-1] < ragged_dims[0]


def takes_all(part: Entry) -> bool:
    """True if an entry takes all of its dim as it is."""
    return isinstance(part, slice) and part.start is None and part.stop is None and part.step in (None, 1)


def kept(part: Any) -> int:
    """Number of dims of the result in place of the dim that an entry acts on."""
    return part.ndim if isinstance(part, Tensor) else int(isinstance(part, slice))


def as_number(at: Any) -> Any:
    """`operator.index`, which would make a constant of a symbol."""
    return at if isinstance(at, (int, torch.SymInt)) else operator.index(at)


def as_end(at: Any) -> int | torch.SymInt:
    """An end of a slice as a whole number."""
    try:
        return as_number(at)
    except TypeError:
        got, hint = describe_index(at), "n // 2 for half of them, a tensor of lengths for other ends in each row"
        raise IndexingError(message("index", "whole numbers as ends of a slice", got, hint=hint)) from None


def step_of(part: slice | Span) -> int:
    """The step of a slice, which is not 0, cut to one longer than any dim."""
    try:
        step = 1 if part.step is None else as_number(part.step)
    except TypeError:
        got = describe_index(part.step)
        raise IndexingError(message("index", "a whole number as step of a slice", got, hint="x[:, ::2]")) from None
    if step == 0:
        raise IndexingError(message("index", "a slice that moves", "step 0", hint="x[:, ::1]"))
    return -FARTHEST if step < -FARTHEST else FARTHEST if step > FARTHEST else step


# -- static dims


def bounds(part: slice, size: int) -> tuple[int, int, int]:
    """First position, the one behind the last, and step of a slice; `slice.indices` for sizes that may be symbolic."""
    step = step_of(part)
    low, high = (0, size) if step > 0 else (-1, size - 1)

    def end(at: Any, default: int) -> int:
        if at is None:
            return default
        at = as_end(at)
        at = at + size if at < 0 else at
        return low if at < low else high if at > high else at

    return end(part.start, low if step > 0 else high), end(part.stop, high if step > 0 else low), step


def cut(x: Tensor, dim: int, part: Entry) -> Tensor:
    """One entry of an index, applied to one dim of a tensor."""
    if isinstance(part, slice) and part.step is not None and part.step < 0:
        first, last, step = bounds(part, x.shape[dim])
        return x.index_select(dim, torch.arange(first, min(last, first), step, device=x.device))
    if isinstance(part, slice):
        start, stop = [at if at is None or isinstance(at, Tensor) else as_end(at) for at in (part.start, part.stop)]
        part = slice(start, stop, part.step)
    try:
        if isinstance(part, int):  # a number in a tuple is a constant of a graph
            return x.select(dim, part)
        return x[(FULL,) * dim + (part,)]
    except IndexError:
        size = x.shape[dim]
        got, hint = show_size(part) if isinstance(part, int) else "one beyond", f"the dim has {size} positions"
        raise IndexingError(message("index", f"positions in {range_of(size)}", got, hint=hint)) from None


def at_examples(x: Any, parts: list[Any]) -> Any:
    """Examples at vectors on several dims, one of which is the batch: in a TensorDict with several batch dims."""
    found = [d for d, part in enumerate(parts) if isinstance(part, Tensor)]
    first, last = found[0], found[-1]
    flat = x.flatten(first, last)
    numbers = torch.arange(flat.shape[first], device=x.device).view([x.shape[d] for d in found])
    try:
        rows = numbers[tuple(parts[first : last + 1])]
    except IndexError as error:
        hint = f"torch: {error}"
        raise IndexingError(message("index", f"examples of {list(numbers.shape)}", "others", hint=hint)) from None
    return flat[(*parts[:first], rows, *parts[last + 1 :])]


def index_example(row: Tensor, parts: list[Any], batch_dim: int, new: list[int]) -> Tensor:
    """The entries of an index behind the one that picked an example, applied to that example."""
    for d in range(len(parts) - 1, -1, -1):
        if d != batch_dim and not takes_all(parts[d]):
            row = cut(row, d - (d > batch_dim), parts[d])
    return insert_dims(row, parts, new, torch.unsqueeze)


def insert_dims(x: X, parts: list[Any], new: list[int], insert: Callable[[X, int], X]) -> X:
    """The result of an index with its new dims of size 1."""
    for done, before in enumerate(new):
        dim = sum([kept(part) for part in parts[:before]]) + done
        x = insert(x, dim)
    return x
