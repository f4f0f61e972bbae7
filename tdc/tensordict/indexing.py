"""Indices on the batch dims of a TensorDict: what they mean, and the leaves at them.

Ragged leaves that share a structure share the new one, too: what depends on the structure alone is done once, and later
operations see without a comparison that operands fit.

A number beside other entries is taken by `select`: in a tuple, torch would make a constant of a graph of it. A number
in a tensor, such as the position of a replay buffer, stays on its device, as an index vector of length 1.

Invariant: an index reaches batch dims only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import GAP, NEW_DIM, entries_of
from tdc.core.container import Container
from tdc.core.dtensor import is_dtensor, part_at
from tdc.core.dynamo import is_on_host, known, traced_for
from tdc.core.errors import (
    IndexingError,
    TdcError,
    UnsupportedError,
    describe,
    describe_index,
    first_line,
    message,
    show_size,
    show_sizes,
)
from tdc.core.keys import is_key, show
from tdc.tensordict.storage import Leaves, mark_examples

Known = tuple[Any, Callable[[Any], Any] | None, Any]  # a ragged leaf, what picks rows of its structure, and its result


class Numbers:  # no constructor: Dynamo makes constants of numbers in the slices that are its arguments
    """An index with numbers.

    Attributes:
        selects: dim and number of each Python number, last dims first.
        dims: the dims that numbers in tensors index, once the others are selected.
        vectors: each number in a tensor as a vector of length 1.
        rest: the index of the other dims.
        given: the index as it was.
    """

    selects: list[tuple[int, int]]
    dims: tuple[int, ...]
    vectors: tuple[Tensor, ...]
    rest: tuple[Any, ...]
    given: Any

    def front(self, x: Tensor) -> Tensor:
        """A view without the dims of Python numbers, and with the dims of numbers in tensors first."""
        for d, i in self.selects:
            x = x.select(d, i)
        first = tuple(range(len(self.dims)))
        return x if self.dims == first else x.movedim(self.dims, first)

    def read(self, x: Tensor) -> Tensor:
        """`x[given]`: a copy where there are numbers in tensors."""
        y = self.front(x)
        y = y[self.vectors].squeeze(0) if self.dims else y
        return y[self.rest] if len(self.rest) else y

    def write(self, x: Tensor, value: Any) -> None:
        """`x[given] = value`."""
        view = self.front(x)
        value = value.to(x.device, x.dtype) if isinstance(value, Tensor) else value
        if self.dims and any([isinstance(part, Tensor) for part in self.rest]):  # torch would pair it with the vectors
            part = view[self.vectors].squeeze(0)
            part[self.rest] = value
            view[self.vectors] = part
        else:
            view[(*self.vectors, *self.rest)] = value


def is_number(part: Any) -> bool:
    """True for a whole number in a tensor."""
    return isinstance(part, Tensor) and part.ndim == 0 and not (part.dtype == torch.bool or part.is_floating_point())


def with_numbers(idx: Any) -> Any:
    """An index without `...` as `Numbers` where such are in it."""
    selects: list[tuple[int, int]] = []
    dims: list[int] = []
    vectors: list[Tensor] = []
    rest: list[Any] = []
    given: Any = idx
    at = 0
    for part in entries_of(given):
        if isinstance(part, int) and not isinstance(part, bool):
            selects.append((at, part))
        elif isinstance(part, Tensor) and is_number(part):
            dims.append(at - len(selects))
            vectors.append(part.to(torch.int64).view(1))
        else:
            rest.append(part)
        at += consumed(part)
    if not dims and not (isinstance(idx, tuple) and selects):
        return given
    out = Numbers()
    out.selects, out.dims, out.vectors = selects[::-1], tuple(dims), tuple(vectors)
    out.rest, out.given = tuple(rest), idx
    return out


def at(x: Tensor, idx: Any) -> Tensor:
    """`x[idx]` of a tensor, for an index as `normal_index` gives it."""
    if type(x) is not Tensor and is_dtensor(x):
        return part_at(x, idx.given if type(idx) is Numbers else idx)
    return idx.read(x) if type(idx) is Numbers else x[idx]


def normal_index(td: Any, idx: Any) -> Any:
    """An index as every leaf takes it: it reaches batch dims only."""
    given: Any = idx
    if isinstance(idx, Container) and idx._picker is not None:
        hint = "F.embedding(ids, table) looks rows of a table up; td[mask] takes a mask over batch dims"
        raise IndexingError(message("index", "an index of batch dims", describe_index(idx), hint=hint))
    try:
        parts: list[Any] = [vector_of(i, td._device) if type(i) is list else i for i in entries_of(given)]
    except (TypeError, ValueError, RuntimeError) as error:
        raise misfit(idx, td._size, error) from None
    found: Any = tuple(parts) if type(idx) is tuple else parts[0]
    if type(found) is tuple or is_mask(found):
        found = batch_index(entries_of(found), td._size)
    return with_numbers(found) if type(found) is tuple or isinstance(found, Tensor) else found


def refuse_beyond(idx: Any, size: torch.Size) -> None:
    """Leave it to torch to refuse numbers beyond the batch: `misfit` has its error."""


@traced_for(refuse_beyond)
def refuse_beyond_traced(idx: Any, size: torch.Size) -> None:
    """Replace `refuse_beyond` in graphs, where torch's error cannot be caught."""
    numbers = idx.selects if type(idx) is Numbers else [(0, idx)] if isinstance(idx, int) else []
    for d, i in numbers:
        n = size[d]
        if known(i < -n) or known(i >= n):
            expected = f"an index into batch_size {show_sizes(size)}"
            got, hint = f"{show_size(i)} at dim {d}", f"dim {d} takes {show_size(-n)} to {show_size(n - 1)}"
            raise IndexingError(message("index", expected, got, hint=hint))


def vector_of(items: Any, device: torch.device | None) -> Tensor:
    """A list as an index vector or a mask. `torch.as_tensor` would make constants of numbers in a graph."""
    return torch.tensor(items, dtype=None if items else torch.int64, device=device)


def indexed(leaves: Leaves, idx: Any) -> Leaves:
    """`x[idx]` of every leaf. Ragged leaves that share a structure share the new one, which is made once."""
    given = idx.given if type(idx) is Numbers else idx
    out: Leaves = {}
    known: list[Known] = []
    for path, x in leaves.items():  # no comprehension, which would make constants of numbers in a slice
        out[path] = at(x, idx) if isinstance(x, Tensor) else picked(x, given, known)
    if known:
        mark_examples(out)
    return out


def selected(leaves: Leaves, idx: Tensor) -> Leaves:
    """`x[idx]` of every leaf, for a vector of positions as `is_vector` knows it."""
    out: Leaves = {}
    known: list[Known] = []
    try:
        for path, x in leaves.items():
            if type(x) is Tensor and x.is_cpu:
                out[path] = x.index_select(0, idx)
            else:
                out[path] = at(x, idx) if isinstance(x, Tensor) else picked(x, idx, known)
    except (IndexError, RuntimeError):  # positions from the end, and what torch selects in the usual way only
        return indexed(leaves, idx)
    if known:
        mark_examples(out)
    return out


def is_vector(idx: Any) -> bool:
    """True for a vector of positions on the host. `index_select` of those takes a quarter of the time of `x[idx]`, and
    checks them."""
    return isinstance(idx, Tensor) and idx.ndim == 1 and idx.dtype == torch.int64 and is_on_host(idx)


def picked(x: Any, idx: Any, known: list[Known]) -> Any:
    """`x[idx]` of a leaf that is no tensor; `known` are leaves before it, whose new structures it shares."""
    if getattr(x, "_picker", None) is None:
        return x[idx]
    for other, pick, first in known:
        if type(x) is type(other) and x._same_structure(other):
            y = x[idx] if pick is None else pick(x)
            return y if isinstance(y, Tensor) else y._with_structure_of(first)
    pick = x._picker(idx)
    y = x[idx] if pick is None else pick(x)
    known.append((x, pick, y))
    return y


def reshared(before: Leaves, after: Leaves) -> Leaves:
    """Results in which leaves that shared a structure before share one again: their batch dims changed alike."""
    known: list[tuple[list[Any], Any]] = []
    out = dict(after)
    for path, y in after.items():
        x = before[path]
        if isinstance(y, Tensor) or type(x) is not type(y) or getattr(x, "_same_structure", None) is None:
            continue
        twin = twin_of([x], known)
        if twin is None:
            known.append(([x], y))
        else:
            out[path] = y._with_structure_of(twin)
    return out


def twin_of(xs: list[Any], known: list[tuple[list[Any], Any]]) -> Any:
    """The known result of operands with the same structures as these; None where there is none."""
    for others, y in known:
        if all([type(x) is type(other) and x._same_structure(other) for x, other in zip(xs, others, strict=True)]):
            return y
    return None


def batch_index(idx: tuple[Any, ...], size: torch.Size) -> Any:
    """An index that cannot reach feature dims: an Ellipsis stands for batch dims only.

    A mask becomes the positions it selects, so that they are searched once and not leaf by leaf.
    """
    used, k = sum([consumed(i) for i in idx]), len(size)
    if used > k:
        got = f"{used} indices"
        hint = "index features leaf by leaf: td.apply(lambda x: x[...])"
        raise IndexingError(message("index", f"at most {k} batch dims indexed", got, hint=hint))
    out: list[Any] = []
    at = 0
    for i in idx:
        if isinstance(i, GAP):
            out += [slice(None)] * (k - used)
            at += k - used
        elif is_mask(i):
            out += positions(i, size[at : at + i.ndim])
        else:
            out.append(i)
        at += consumed(i)
    return out[0] if len(out) == 1 and not isinstance(out[0], list) else tuple(out)  # torch reads x[[i]] as x[i]


def positions(mask: Tensor, size: torch.Size) -> tuple[Tensor, ...]:
    """Positions of a mask over whole batch dims, one index tensor for each; an IndexingError for another shape."""
    if mask.shape != size:
        got = f"mask of shape {show_sizes(mask.shape)}"
        hint = "a mask covers whole batch dims"
        raise IndexingError(message("index", f"a mask of shape {show_sizes(size)}", got, hint=hint))
    return mask.nonzero(as_tuple=True)


def is_mask(i: Any) -> bool:
    """True if an entry of an index is a mask over one or more dims."""
    return isinstance(i, Tensor) and i.dtype == torch.bool and i.ndim > 0


def consumed(i: Any) -> int:
    """Batch dims that one entry of an index uses up: None and Ellipsis none, a mask as many as it has, others one."""
    if isinstance(i, (NEW_DIM, GAP, bool)):
        return 0
    return i.ndim if isinstance(i, Tensor) and i.dtype == torch.bool else 1


def uses_dims(idx: Any) -> bool:
    """True if an index needs batch dims to be there, as `None`, `...` and `True` do not."""
    return any([consumed(part) for part in entries_of(idx)])


def refused(leaves: Leaves, idx: Any, error: Exception) -> Exception:
    """The error for leaves that take no such index, as sparse tensors and those of `torch.nested`; else the same."""
    wrong: dict[str, str] = {}
    if type(error) not in (RuntimeError, NotImplementedError):
        return error
    for path, x in leaves.items():
        try:
            indexed({path: x}, idx)
        except (RuntimeError, NotImplementedError):
            wrong[show(path)] = describe(x)
    hint = f"td.exclude(key) first; torch: {first_line(error)[:100]}"
    return UnsupportedError(message("index", "leaves that take this index", f"{len(wrong)} others", wrong, hint))


def misfit(idx: Any, size: torch.Size, error: Exception) -> Exception:
    """The error for an index that torch refuses; a leaf's own error says more."""
    if isinstance(error, TdcError):
        return error
    ranges = ", ".join([f"dim {d} takes {-n} to {n - 1}" if n else f"dim {d} is empty" for d, n in enumerate(size)])
    hint = f"{ranges}; keys are strings: td['key']"
    keys: Any = idx
    if isinstance(idx, list) and keys and all([is_key(key) for key in keys]):
        hint = f"td.select({', '.join([repr(key) for key in keys])})"
    steps: list[Any] = [getattr(part, "step", None) for part in entries_of(idx)]  # of slices
    if any([isinstance(step, int) and step < 0 for step in steps]):
        hint = "td.flip(dim) for the other order"
    expected, got = f"an index into batch_size {show_sizes(size)}", f"td[{describe_index(idx)}]"
    return IndexingError(message("index", expected, got, hint=hint))
