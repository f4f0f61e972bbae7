"""Packed batches from separate examples: tensors, nested Python lists, numpy arrays, object arrays of arrays.

Invariant: which dims are ragged is declared, never inferred from sizes that happen to agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any, overload

import torch
from torch import Tensor

from tdc.core.arguments import as_own_device, expect, int_tuple
from tdc.core.container import Container
from tdc.core.errors import DtypeError, ShapeError, StructureError, describe, first_line, message, refuse_wrong
from tdc.core.typing import Dims
from tdc.layout.segments import sizes_on_host, structure_of_sizes
from tdc.layout.structure import remember
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.two_level import TwoLevelTensor, build_two_level, check_batch


def from_list(
    rows: Sequence[Any], *, ragged_dim: Dims = 1, dtype: torch.dtype | None = None, device: Any = None
) -> NestedTensor:
    """Nested Python lists as a packed batch; `x.tolist()` is the way back.

    Args:
        rows: one list for each row, of numbers or of lists of one size; the other sizes of an empty row are as there.
        ragged_dim: as of `tdc.pack`.
        dtype: of the values; by default the one that holds all rows, as of `torch.tensor`.

    Raises:
        StructureError: no row at all.
        DtypeError: rows that are no lists, or hold something else than numbers.
        ShapeError: lists within a row that differ in length, or rows that differ in other dims.

    Compile:
        Eager: lists are data.

    Example:
        >>> x = from_list([[1, 2], [], [3]])
        >>> x.shape, x.values, x.tolist()
        (torch.Size([3, -1]), tensor([1, 2, 3]), [[1, 2], [], [3]])
    """
    check_rows("from_list", rows, (list, tuple))
    if dtype is not None:
        expect("from_list", dtype, torch.dtype, of=" for dtype")
    device = as_own_device("from_list", device)
    found = [row_of("from_list", row, i, dtype, device) for i, row in enumerate(rows)]
    full = [row for row in found if row.numel()] or found
    common = dtype or reduce(torch.promote_types, [row.dtype for row in full])
    dims = int_tuple("from_list", ragged_dim)
    sizes = [0 if i + 1 in dims else n for i, n in enumerate(full[0].shape)]  # of an empty list
    found = [row.new_zeros(sizes) if row.shape == (0,) and 0 in sizes else row for row in found]
    return pack([row.to(common) for row in found], ragged_dim=ragged_dim)


def from_numpy(arrays: Any, *, ragged_dim: Dims = 1, device: Any = None) -> NestedTensor:
    """numpy arrays of different sizes as a packed batch: a list of them, or one array of dtype object.

    Args:
        arrays: rows of one dtype; each is read in place and copied once, by packing.
        ragged_dim: as of `tdc.pack`.

    Raises:
        StructureError: no row at all.
        DtypeError: rows that are no arrays, or of different dtypes or one that torch does not have.
        ShapeError: rows that differ in other dims.

    Compile:
        Eager: numpy.

    Example:
        >>> import numpy as np
        >>> from_numpy([np.zeros((2, 4)), np.zeros((3, 4))]).shape
        torch.Size([2, -1, 4])
    """
    check_rows("from_numpy", arrays, ())
    wrong = {f"row {i}": describe(row) for i, row in enumerate(arrays) if not has_array(row)}
    hint = "tdc.from_list(rows) for nested lists"
    refuse_wrong(DtypeError, "from_numpy", "numpy arrays", wrong, "rows that are not", hint)
    device = as_own_device("from_numpy", device)
    return pack([row_of("from_numpy", row, i, None, device) for i, row in enumerate(arrays)], ragged_dim=ragged_dim)


def has_array(row: Any) -> bool:
    """True of numpy arrays, and of what numpy makes arrays of."""
    return hasattr(row, "__array__") and not isinstance(row, Container)


def check_rows(op: str, rows: Any, kinds: tuple[type, ...]) -> None:
    """Examples come as a sequence, each of a type that the function takes."""
    sized = hasattr(rows, "__len__") and not any([isinstance(rows, kind) for kind in (str, bytes, type)])
    if not sized or getattr(rows, "ndim", 1) == 0:
        raise DtypeError(message(op, "a sequence of rows", describe(rows), hint="one entry for each row"))
    if not len(rows):
        hint = "NestedTensor(values of shape (0, ...), torch.zeros(1, dtype=torch.int64)) is a batch of no rows"
        raise StructureError(message(op, "at least one row", "none", hint=hint))
    wrong = {f"row {i}": describe(row) for i, row in enumerate(rows) if kinds and not isinstance(row, kinds)}
    hint = "one list for each row; tdc.pack(tensors), tdc.from_numpy(arrays)"
    refuse_wrong(DtypeError, op, "rows that are lists", wrong, "that are not", hint)


def row_of(op: str, row: Any, i: int, dtype: torch.dtype | None, device: Any) -> Tensor:
    """One example as a tensor."""
    try:
        return torch.as_tensor(row, dtype=dtype, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        at = {f"row {i}": describe(row)}
        if "expected sequence of length" in str(error):
            hint = "pad the inner lists, or build the rows and tdc.pack(rows, ragged_dim=...)"
            got = "lists of different lengths in one row"
            raise ShapeError(message(op, "lists of one length in each row", got, at, hint)) from None
        hint = "turn texts and objects into numbers first, as a tokenizer does"
        if isinstance(error, RuntimeError) and "infer dtype" not in str(error):  # a number beyond its dtype
            hint = f"torch: {first_line(error)}"
        raise DtypeError(message(op, "rows of numbers", "something else", at, hint)) from None


@overload
def pack(tensors: Sequence[NestedTensor]) -> TwoLevelTensor: ...
@overload
def pack(tensors: Sequence[Tensor], *, ragged_dim: Dims = 1) -> NestedTensor: ...
def pack(tensors: Sequence[Any], *others: Any, ragged_dim: Dims = 1) -> NestedTensor | TwoLevelTensor:
    """Pack tensors of different sizes into one batch; NestedTensors, as documents of sentences, into one of two levels.

    Shapes:
        `[(*S0, L_i, *S1), ...] -> (B, *S0, -1, *S1)`.
        NestedTensors `[(S_i, *S0, -1, *S1), ...] -> (B, -1, *S0, -1, *S1)`, a TwoLevelTensor.

    Args:
        tensors: at least one; equal dtype, device and sizes outside the ragged dims. Of a padded tensor all positions
            are taken for real: `tdc.from_padded(data, lengths).to_packed()` leaves padding out.
        ragged_dim: logical dim (the batch is dim 0) in which they may differ; a tuple of neighbouring dims for several.
            NestedTensors have their own.

    Raises:
        StructureError: no tensor at all (then dtype and feature sizes are unknown).
        DtypeError: rows that are no tensors, or of different dtypes.
        ShapeError: they differ outside the ragged dims; every differing one is named.

    Compile:
        Runs inside a graph, too (one `cat`), with the number of tensors fixed.

    Example:
        >>> x = pack([torch.ones(2, 4), torch.ones(3, 4)])
        >>> x.shape, x.offsets
        (torch.Size([2, -1, 4]), tensor([0, 2, 5]))
    """
    if others:
        got = f"{1 + len(others)} arguments"
        raise DtypeError(message("pack", "one list of tensors", got, hint="tdc.pack([tensor, ...])"))
    if not isinstance(tensors, Iterable) or (isinstance(tensors, Tensor) and tensors.ndim == 0):
        raise DtypeError(message("pack", "a list of tensors", describe(tensors), hint="tdc.pack([tensor, ...])"))
    tensors = list(tensors)
    if not tensors:
        hint = "NestedTensor(values of shape (0, ...), torch.zeros(1, dtype=torch.int64)) is a batch of no rows"
        raise StructureError(message("pack", "at least one tensor", "an empty list", hint=hint))
    first, dims = tensors[0], int_tuple("pack", ragged_dim)
    if isinstance(first, NestedTensor):
        return pack_nested(tensors, dims)
    check_dtypes(tensors)
    check_shapes(tensors, dims)
    e, count = dims[0] - 1, len(dims)
    sizes = [tuple(t.shape[e : e + count]) for t in tensors]
    known = torch.tensor(sizes, dtype=torch.int64, device="cpu").view(len(sizes), count)
    values = torch.cat([t.flatten(e, e + count - 1) for t in tensors] if count > 1 else tensors, e)
    top = tuple([max(column) for column in zip(*sizes, strict=True)])
    s = structure_of_sizes(known.to(first.device), top, e)
    return build_nested(s if first.is_cpu else remember(sizes_on_host, s, known), values)


def pack_nested(rows: list[Any], dims: tuple[int, ...]) -> TwoLevelTensor:
    """NestedTensors of one layout as one batch of two levels."""
    if dims != (1,):
        hint = "tdc.pack(rows): the ragged dims are those of the rows"
        raise ShapeError(message("pack", "NestedTensors without ragged_dim=", f"{dims}", hint=hint))
    wrong = {f"row {i}": describe(x) for i, x in enumerate(rows) if not isinstance(x, NestedTensor)}
    hint = "one NestedTensor for each row"
    refuse_wrong(DtypeError, "pack", "rows that are all NestedTensors", wrong, "that are not", hint)
    first = rows[0]
    for x in rows:
        check_batch(x, "pack")
    alike = [(x.dtype, x.device, x.ragged_dims, x.shape[1:]) for x in rows]
    wrong = {f"row {i}": f"{describe(x)} on {x.device}" for i, x in enumerate(rows) if alike[i] != alike[0]}
    if wrong:
        expected, hint = f"rows like the first, {describe(first)} on {first.device}", "convert them with .to(...)"
        raise ShapeError(message("pack", f"{expected}, but for their lengths", f"{len(wrong)} others", wrong, hint))
    known = [x for x in rows if x.structure.extent is not None or x.structure.batch_size]  # an empty one tells nothing
    values: Any = torch.cat(known or rows)
    lengths = [x.structure.batch_size for x in rows]
    sizes = torch.tensor(lengths, dtype=torch.int64, device="cpu").view(-1, 1)
    s = structure_of_sizes(sizes.to(first.device), (max(lengths),))
    return build_two_level(s if sizes.device == first.device else remember(sizes_on_host, s, sizes), values)


def check_dtypes(tensors: list[Any]) -> None:
    """Examples to be packed are tensors of one dtype on one device."""
    wrong = {f"row {i}": describe(t) for i, t in enumerate(tensors) if not isinstance(t, Tensor)}
    if wrong:
        first: Any = next(t for t in tensors if not isinstance(t, Tensor))
        hint = "tdc.from_list(rows)" if isinstance(first, (list, tuple)) else "torch.as_tensor(row)"
        hint = "tdc.from_numpy(rows)" if has_array(first) else hint
        raise DtypeError(message("pack", "tensors", f"{len(wrong)} rows that are not", wrong, hint))
    device, first = tensors[0].device, tensors[0].dtype
    wrong = {f"row {i}": f"{describe(t)} on {t.device}" for i, t in enumerate(tensors) if t.device != device}
    if wrong:
        got, hint = f"{len(wrong)} elsewhere", "move them with .to(device)"
        raise DtypeError(message("pack", f"rows on {device}, as the first", got, wrong, hint))
    wrong = {f"row {i}": describe(t) for i, t in enumerate(tensors) if t.dtype != first}
    if wrong:
        got = f"{len(wrong)} that differ"
        raise DtypeError(message("pack", f"rows of {first}, as the first", got, wrong, "convert them with .to(dtype)"))


def check_shapes(tensors: list[Tensor], dims: tuple[int, ...]) -> None:
    """Examples to be packed agree in everything but their ragged dims."""
    first = tensors[0]
    if first.ndim == 0:
        hint = "stack numbers with torch.stack; rows of one element have shape [1]"
        raise ShapeError(message("pack", "rows with at least one dim", describe(first), hint=hint))
    if not dims or dims != tuple(range(dims[0], dims[0] + len(dims))) or not 1 <= dims[0] <= dims[-1] <= first.ndim:
        hint = "dim 0 is the batch; permute the rows so that ragged dims are neighbours"
        raise ShapeError(message("pack", f"neighbouring ragged dims in [1, {first.ndim}]", str(dims), hint=hint))

    def static(t: Tensor) -> tuple[Any, ...]:
        return t.ndim, *(n for i, n in enumerate(t.shape) if i + 1 not in dims)

    wrong = {f"row {i}": describe(t) for i, t in enumerate(tensors) if static(t) != static(first)}
    if wrong:
        where = f"dim {dims[0] - 1}" if len(dims) == 1 else f"dims {', '.join([str(d - 1) for d in dims])}"
        expected = f"rows like the first, {describe(first)}, that differ in {where} only"
        got, hint = f"{len(wrong)} others", "name the dims that differ with ragged_dim=, the batch counting as dim 0"
        raise ShapeError(message("pack", expected, got, wrong, hint))
