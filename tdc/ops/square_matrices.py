"""Ragged square matrices: in one rectangle for torch's function, and results as a batch again.

    x (B, *S, -1, -1)    squares(x): data (B, *S, L, L), 0 where there is nothing, and where that is, (B, L)
    back(out, "ij", x)   matrices   (B, *S, L, L) -> (B, *S, -1, -1)
    back(out, "i", x)    vectors    (B, *S, L)    -> (B, *S, -1)
    back(out, "", x)     numbers    (B, *S)

In a rectangle a matrix is followed by what leaves its own result alone: an identity matrix, or see `spectrum`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.asserts import require
from tdc.core.errors import ShapeError, message
from tdc.core.typing import Op
from tdc.layout.padding import pack_rows, pad_rows
from tdc.layout.segments import longest, structure_of_sizes, tell, total_of
from tdc.layout.structure import Structure
from tdc.ops.rectangle import repacked, with_sizes
from tdc.ops.spectrum import along_rows
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import Ragged, ragged_sizes


def require_square(op: Op, x: Any) -> None:
    """A ShapeError where some ragged matrix is not square. Immediate on CPU, asynchronous on CUDA."""
    sizes = ragged_sizes(x)
    text = message(op, "square matrices", "one that is not", hint="x.sizes shows them")
    require((sizes[:, 0] == sizes[:, 1]).all(), text, ShapeError)


def squares(op: Op, x: Any) -> tuple[Tensor, Tensor]:
    """Ragged square matrices in one rectangle (B, *S, L, L), 0 where there is nothing, and a mask (B, L) of that."""
    require_square(op, x)
    data = square_data(x)
    return data, torch.arange(data.shape[-1], device=data.device) >= ragged_sizes(x)[:, :1]


def square_data(x: Any) -> Tensor:
    """Ragged matrices in square rectangles, 0 where there is nothing, the batch in front."""
    if isinstance(x, MaskedBatch):
        data, n = x.filled(0), min(x.shape[-2:])
        return data[..., :n, :n].movedim(x.batch_dim, 0)
    s = x._structure
    n = longest(s)[0]
    return pad_rows(x._values.movedim(s.packed_dim, 0), s, (n, n), cut=True).movedim((1, 2), (-2, -1))


def with_identity(data: Tensor, beyond: Tensor) -> Tensor:
    """Square matrices, each followed by an identity matrix."""
    return data + torch.diag_embed(along_rows(beyond, data).to(data.dtype))


def beside_identity(run: Op, data: Tensor, beyond: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A function whose result for a matrix followed by an identity matrix holds that for the matrix."""
    return run(with_identity(data, beyond), *args, **kwargs)


def back(out: Tensor, part: str, x: Any) -> Ragged | Tensor:
    """A result for square rectangles as the batch it is, or as numbers."""
    if part == "i":
        return vectors(out, x)
    if part and isinstance(x, MaskedBatch):
        out = F.pad(out, (0, x.shape[-1] - out.shape[-1], 0, x.shape[-2] - out.shape[-2]))
    out = out.movedim(0, x._batch_dim)
    return repacked(out, x) if part else out


def vectors(out: Tensor, x: Any) -> Ragged:
    """Vectors (B, *S, L) of the sizes of ragged square matrices."""
    if isinstance(x, MaskedBatch):
        out = F.pad(out, (0, x.shape[-1] - out.shape[-1])).movedim(0, x.batch_dim)
        return with_sizes(out, x, ragged_sizes(x)[:, :1], (out.ndim - 1,))
    s, own = x._structure, vector_structure(x, out.shape[-1])
    values = pack_rows(out.movedim(-1, 1), own, total_of(own))
    return build_nested(own.moved(s.packed_dim, s.batch_dim), values.movedim(0, s.packed_dim))


def vector_structure(x: NestedTensor, most: int) -> Structure:
    """The structure of vectors (n,) for ragged square matrices (n, n), and the longest."""
    own = structure_of_sizes(ragged_sizes(x)[:, :1], (most,))
    return tell(own, [x._structure], lambda known: known[0][:, :1])
