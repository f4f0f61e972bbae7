"""Buckets: batches rounded up to a few sizes, so that shapes may be static, as CUDA graphs and autotuning want them.

`buckets` makes sizes for `tdc.compile.Buckets`. `to_bucket` and `unbucket` fill batches by hand; they are deprecated,
since `buckets="auto"` of `counted` and `train_step` takes the filling out of all results.

    rows, totals = buckets(8, 64), buckets(1024, 16384)
    batch, valid = to_bucket(batch, rows=rows, totals=totals)
    out = unbucket(compiled(batch), valid)

Filling is rows behind the real ones, never a longer real row, so results of real rows stay the same. They repeat real
content, so finite values stay finite: gradients of a loss without them are exact.

    offsets  0 2 5            0 2 5 7 8         two real rows of 5 elements, in a bucket of 4 rows and 8 elements
    values   a b c d e        a b c d e a b c

Invariants: a packed batch gets at least one filling row, each of at least one element; sizes of a bucketed batch are
marked static, one compile for each bucket.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.compile._torch.dynamo import mark_static
from tdc.core import pytree
from tdc.core.arguments import expect, expect_number
from tdc.core.container import Container
from tdc.core.errors import DtypeError, ShapeError, StructureError, UnsupportedError, describe, message, refuse_wrong
from tdc.layout.structure import Structure, extent_of
from tdc.ragged.masked import MaskedBatch, build_masked
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.tensordict.shared import over, without_shared
from tdc.tensordict.storage import is_tensordict
from tdc.tensordict.tensordict import build_td

T = TypeVar("T")
Sizes = Sequence[int]


def buckets(low: int, high: int, *, growth: float = 2.0) -> tuple[int, ...]:
    """Sizes from `low` to `high`, each at most `growth` times the one before.

    A batch is rounded up to the next of them, so at most the part `1 - 1 / growth` of it is filling.

    Raises:
        ShapeError: not `1 <= low <= high`, or growth not above 1.

    Example:
        >>> buckets(8, 64), buckets(1000, 4000, growth=1.5)
        ((8, 16, 32, 64), (1000, 1500, 2250, 3375, 4000))
    """
    expect_number("compile.buckets", low, high, whole=True)
    if not 1 <= low <= high or growth <= 1:
        got = f"low={low}, high={high}, growth={growth}"
        raise ShapeError(message("compile.buckets", "1 <= low <= high and growth > 1", got, hint="buckets(8, 64)"))
    sizes = [low]
    while sizes[-1] < high:
        sizes.append(min(high, max(sizes[-1] + 1, int(sizes[-1] * growth))))
    return tuple(sizes)


def to_bucket(
    x: Any, *, rows: Sizes | None = None, totals: Sizes | None = None, lengths: Sizes | None = None
) -> tuple[Any, Tensor]:
    """Fill a batch up to the next bucket, with rows behind the real ones.

    Deprecated: `counted(fn, buckets="auto")` and `train_step(..., buckets="auto")` fill batches, and take the filling
    out of results.

    Args:
        x: a NestedTensor, a MaskedBatch, or a TensorDict with one batch dim of such leaves and tensors.
        rows: sizes for the number of rows with filling. By default a packed batch gets one more row, another stays.
        totals: sizes for the packed elements of a NestedTensor with filling; required for one.
        lengths: sizes for the longest row: the width of a MaskedBatch, `max_length` of a NestedTensor. By default the
            width stays, and `max_length` becomes the next power of two.

    Returns:
        The batch, and `valid` `(B,)` bool, True for real rows.

    Raises:
        ShapeError: the batch is larger than the largest size; the sizes are named.
        DtypeError: sizes that are no ints.
        StructureError: a NestedTensor without `totals`.
        UnsupportedError: another kind of batch, or a batch dim that is not the first.

    Warns:
        DeprecationWarning: in each call.

    Compile:
        Outside of the graph. Reads no data. One compile for each bucket; those of `max_length` count only where a
        function pads.

    Example:
        >>> x = NestedTensor(torch.arange(5.0), torch.tensor([0, 2, 5]))
        >>> with warnings.catch_warnings(action="ignore"):
        ...     batch, valid = to_bucket(x, rows=(4, 8), totals=(8, 16))
        >>> batch.offsets.tolist(), valid.tolist(), batch.sum(1)[valid].tolist()
        ([0, 2, 5, 7, 8], [True, True, False, False], [1.0, 9.0])
    """
    warn_of("to_bucket")
    packed = packed_leaves(x)
    if packed and totals is None:
        hint = "totals=tdc.compile.buckets(low, high)"
        raise StructureError(message("compile.to_bucket", "totals for packed elements", "none", hint=hint))
    for name, sizes in {"rows": rows, "totals": totals, "lengths": lengths}.items():
        if sizes is not None and not (isinstance(sizes, (tuple, list)) and all([isinstance(n, int) for n in sizes])):
            got, hint = describe(sizes), f"{name}=tdc.compile.buckets(low, high)"
            raise DtypeError(message("compile.to_bucket", f"a tuple of ints as {name}", got, hint=hint))
    real = int(x.batch_size[0])
    count = real + packed
    if rows is not None:
        count = next_size(count, rows, "rows", f"{real} rows" + " and a filling one" * packed)
    device = next(iter(x._leaves.values())).device if is_tensordict(x) and x._leaves else x.device
    return fill(x, count, totals or (), lengths), mark_static(torch.arange(count, device=device) < real)


def unbucket(x: T, valid: Tensor) -> T:
    """Results without the rows that `to_bucket` added: the first rows of each tensor and container of a tree.

    Deprecated: `counted(fn, buckets="auto")` and `train_step(..., buckets="auto")` take the filling out of results.

    Args:
        x: results with one row for each row of the bucketed batch; numbers and tensors without dims stay.
        valid: as `to_bucket` returned it; read on the host.

    Raises:
        ShapeError: a result has another number of rows; each is named.

    Warns:
        DeprecationWarning: in each call.

    Compile:
        Outside of the graph, where the sizes may vary again.

    Example:
        >>> with warnings.catch_warnings(action="ignore"):
        ...     unbucket((torch.tensor([1.0, 2.0, 9.0]), torch.tensor(3.0)), torch.tensor([True, True, False]))
        (tensor([1., 2.]), tensor(3.))
    """
    warn_of("unbucket")
    expect("compile.unbucket", valid, Tensor, of=", the one to_bucket returned")
    count, real = valid.shape[0], int(valid.sum())
    leaves, spec = pytree.tree_flatten(x, is_leaf=lambda v: isinstance(v, Container))
    plain = [not isinstance(v, (Tensor, Container)) or v.ndim == 0 for v in leaves]
    wrong = [describe(v) for v, kept in zip(leaves, plain, strict=True) if not kept and len(v) != count]
    hint = "results over all rows are not split by rows; mask them with valid instead"
    refuse_wrong(ShapeError, "compile.unbucket", f"{count} rows", wrong, "others", hint)
    return pytree.tree_unflatten([v if kept else v[:real] for v, kept in zip(leaves, plain, strict=True)], spec)


def warn_of(name: str) -> None:
    """Warn that a function of batches filled by hand is deprecated."""
    text = f"tdc.compile.{name} is deprecated, and goes with version 0.4"
    hint = 'counted(fn, buckets="auto"), or train_step(..., buckets="auto"), fills batches and cuts results'
    warnings.warn(f"{text}\nhint: {hint}", DeprecationWarning, stacklevel=3)


def packed_leaves(x: Any) -> bool:
    """True if there is a packed batch to fill; refuse values that cannot be filled."""
    if is_tensordict(x) and len(x._size) == 1:
        return any([packed_leaves(leaf) for leaf in without_shared(x._leaves).values() if not isinstance(leaf, Tensor)])
    if isinstance(x, NestedTensor) and x.structure.batch_dim == 0 and x.structure.packed_dim == 0:
        return True
    if isinstance(x, MaskedBatch) and x.batch_dim == 0:
        return False
    expected = "a NestedTensor, a MaskedBatch or a TensorDict of them, with the batch as its one first dim"
    hint = "tdc.TensorDict({'x': x}, [B]) for a plain tensor"
    raise UnsupportedError(message("compile.to_bucket", expected, describe(x), hint=hint))


def next_size(count: int, sizes: Sizes, name: str, what: str) -> int:
    """Smallest size that holds a count; refuse a larger count."""
    fitting = [size for size in sizes if size >= count]
    if not fitting:
        got = f"{what} for {name}={tuple(sizes)}"
        hint = "add a larger size, or split the batch"
        raise ShapeError(message("compile.to_bucket", f"a size of at least {count}", got, hint=hint))
    return min(fitting)


def fill(x: Any, count: int, totals: Sizes, lengths: Sizes | None) -> Any:
    """A batch of `count` rows."""
    if is_tensordict(x):
        size = torch.Size([count])
        leaves = {path: over(fill(leaf, count, totals, lengths), size) for path, leaf in x._leaves.items()}
        return build_td(leaves, x._nodes, size, x._device)
    if isinstance(x, NestedTensor):
        return fill_nested(x, count, totals, lengths)
    if isinstance(x, MaskedBatch):
        return fill_masked(x, count, lengths)
    return mark_static(repeated(x, count)) if isinstance(x, Tensor) else x


def repeated(x: Tensor, count: int) -> Tensor:
    """A tensor with its rows repeated from the first on, up to `count`; zeros where there are none."""
    if x.shape[0] == 0:
        return x.new_zeros((count, *x.shape[1:]))
    return x.index_select(0, torch.arange(count, device=x.device) % x.shape[0])


def fill_nested(x: NestedTensor, count: int, totals: Sizes, lengths: Sizes | None) -> NestedTensor:
    """Filling rows that share the filling elements evenly."""
    s, n, more = x.structure, x.values.shape[0], count - x.structure.batch_size
    total = next_size(n + more, totals, "totals", f"{n} packed elements and {more} for filling rows")
    each = [(total - n) // more + (i < (total - n) % more) for i in range(more)]
    added = torch.tensor(each, device=s.offsets.device)
    offsets = torch.cat([s.offsets, s.offsets[-1:] + added.cumsum(0)])
    shapes = s.shapes
    if shapes is not None:
        ones = added.new_ones((more, s.ragged_ndim - 1))
        shapes = mark_static(torch.cat([shapes, torch.cat([added[:, None], ones], 1)]))
    extent = None
    if s.extent is not None:
        top = [max(size, each[0] if r == 0 else 1) for r, size in enumerate(s.extent.shape[:-1])]
        extent = mark_static(extent_of(tuple([width(size, lengths) for size in top]), x.device))
    values = repeated(x.values, total)
    filled = Structure(mark_static(offsets), shapes, extent, s.packed_dim, s.batch_dim, s.ragged_ndim)
    out = build_nested(filled, values)
    mark_static(values)  # `like` marks them
    return out


def fill_masked(x: MaskedBatch, count: int, lengths: Sizes | None) -> MaskedBatch:
    """Filling rows that repeat real ones, and padding up to a size of `lengths`."""
    data, sizes = repeated(x.data, count), repeated(x.lengths, count)
    if lengths is not None:
        pad = [0, 0] * x.ndim
        for d in x.ragged_dims:
            pad[2 * (x.ndim - 1 - d) + 1] = width(x.data.shape[d], lengths) - x.data.shape[d]
        data = F.pad(data, pad)
    out = build_masked(data, sizes, x.ragged_dims)
    for part in (data, sizes):
        mark_static(part)
    return out


def width(longest: int, lengths: Sizes | None) -> int:
    """Bucket of the longest row; the next power of two without sizes."""
    if lengths is None:
        return 1 << max(longest - 1, 0).bit_length()
    return next_size(longest, lengths, "lengths", f"rows of up to {longest} elements")
