"""Lengths of vectors in a ragged batch: `vector_norm`, `norm`, `linalg.norm`, `dist`, `normalize`; and `hash_tensor`.

    vector_norm(x, p, d) = sum(|x|^p, d)^(1/p)     inf: the largest |x|     -inf: the smallest     0: how many are not 0

Invariants: a norm is of the real elements, so an empty example has norm 0 (inf for a negative ord); the derivative at 0
is 0, as in torch.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import is_infinite
from tdc.core.dtypes import widened
from tdc.core.dynamo import maps_views_of_bits
from tdc.core.errors import UnsupportedError, message
from tdc.core.rules import MODES, define
from tdc.ops.reduce.partial_ragged import along_lines, by_lines
from tdc.ops.reduce.reduction import filled, reduce_ragged, reduced_dims
from tdc.ops.tensordict.batch import along
from tdc.ragged.storage import Ragged, data_of, with_data


def vector_norm_ragged(
    x: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, op: Any = None
) -> Ragged | Tensor:
    """`op` is the operation that errors name."""
    dense = torch.linalg.vector_norm
    return reduce_ragged(op or dense, norm_of, dense, x, dim, keepdim, ord=ord, dtype=dtype)


def norm_of(x: Any, dims: tuple[int, ...], keepdim: bool, ord: float, dtype: Any = None) -> Tensor:
    """The norm over dims with a ragged one among them; half precision is summed in float32."""
    x = filled(x if dtype is None else x.to(dtype), 0)
    size = x.abs()
    out = size.dtype
    if ord == 0:  # a number has this norm with its derivative, which is 0
        each = torch.linalg.vector_norm(data_of(x).unsqueeze(-1), 0, -1)
        return widened(with_data(x, each)).sum(dims, keepdim).to(out)
    if is_infinite(ord):  # with NaN there is no derivative: torch's is 0
        nan = size != size
        found = size.masked_fill(nan, 0 if ord > 0 else math.inf)
        found = found.amax(dims, keepdim).clamp(min=0) if ord > 0 else filled(found, math.inf).amin(dims, keepdim)
        return found.masked_fill(nan.any(dims, keepdim), math.nan)
    size = widened(size)
    if ord == 1:
        return size.sum(dims, keepdim).to(out)
    edge = 0.0 if ord > 0 else math.inf  # the power of 0, and the norm of nothing
    if ord == 2:
        power = torch.real(x.mul(x.conj())) if x.dtype.is_complex else widened(x).square()
    elif ord < 1:  # the derivative of such a power has no bound at 0
        zero = size.eq(0)
        power = size.masked_fill(zero, 1).pow(ord).masked_fill(zero, edge)
        power = power if ord > 0 else filled(power, 0)
    else:
        power = size.pow(ord)
    total = power.sum(dims, keepdim)
    none = total == 0
    return total.masked_fill(none, 1).pow(1 / ord).masked_fill(none, edge).to(out)


def norm_ragged(
    x: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, out: Any = None, dtype: Any = None
) -> Ragged | Tensor:
    """`torch.norm`: of vectors; the norms of matrices are in `torch.linalg`, and `p="nuc"` is an UnsupportedError."""
    if isinstance(out, torch.dtype):  # the method has no `out`
        dtype = out
    if p == "nuc":
        hint = "torch.linalg.matrix_norm(x, 'nuc') of static dims"
        raise UnsupportedError(message("norm", "the norm of a vector, p a number or 'fro'", "'nuc'", hint=hint))
    return vector_norm_ragged(x, 2 if p in ("fro", None) else p, dim, keepdim, dtype=dtype, op=torch.norm)


def linalg_norm_ragged(
    x: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Ragged | Tensor:
    """`torch.linalg.norm`: of vectors where there is one dim or no ord; an UnsupportedError for matrices."""
    one = isinstance(dim, int) or (dim is not None and len(dim) == 1)
    if ord is None or (one and not isinstance(ord, str)):
        return vector_norm_ragged(x, 2 if ord is None else ord, dim, keepdim, dtype=dtype, op=torch.linalg.norm)
    got, hint = f"ord {ord} and dim {dim}", "torch.linalg.vector_norm(x, ord, dim), or torch.linalg.matrix_norm"
    raise UnsupportedError(message(torch.linalg.norm, "ord and one dim, or no ord", got, hint=hint))


def dist_ragged(input: Any, other: Any, p: float = 2) -> Ragged | Tensor:
    """The norm of the difference of all real elements."""
    return vector_norm_ragged(torch.sub(input, other), p, op=torch.dist)


def normalize_ragged(input: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None) -> Ragged:
    """Vectors along dim 1, unless another is named, divided by their norm; an UnsupportedError where `out` is given."""
    if out is not None:
        raise UnsupportedError(message("normalize", "no out=", "one", hint="use what it returns"))
    if by_lines(F.normalize, input, dim):
        return along_lines(F.normalize, partial(normalize_ragged, p=p, eps=eps), input, dim)
    return input / vector_norm_ragged(input, p, dim, keepdim=True).clamp_min(eps)


def hash_ragged(x: Any, dim: Any = (), *, keepdim: bool = False, mode: int = 0) -> Ragged | Tensor:
    """The exclusive or of the bits of elements: whether each bit is set in an odd number of them."""
    if mode != 0:
        raise UnsupportedError(message("hash_tensor", "mode 0, exclusive or", f"mode {mode}", hint="leave mode out"))
    dims = reduced_dims(torch.hash_tensor, dim, x.ndim)
    odd = with_data(x, bits(data_of(x))).sum(dims, keepdim).remainder(2)
    return word(odd) if isinstance(odd, Tensor) else with_data(odd, word(data_of(odd)))


def bits(values: Tensor) -> Tensor:
    """The 64 bits of each element as a last dim, of a float64 or an int64 as torch takes them."""
    wide = values.to(torch.float64 if values.is_floating_point() else torch.int64).contiguous()
    shifts = torch.arange(8, dtype=torch.uint8, device=values.device)
    return ((wide.unsqueeze(-1).view(torch.uint8).unsqueeze(-1) >> shifts) & 1).flatten(-2)


def word(bits: Tensor) -> Tensor:
    """Elements of 64 bits from their bits."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    octets = bits.to(torch.uint8).unflatten(-1, (8, 8)) << shifts
    return octets.sum(-1, dtype=torch.uint8).contiguous().view(torch.uint64).squeeze(-1)


MAPPED = MODES if maps_views_of_bits() else ("eager", "compile", "grad", "export")
_op = torch.linalg.vector_norm
along(_op, "x ord dim**=None keepdim", "vector_norm", ragged=vector_norm_ragged, identity=0)
along(torch.norm, "input p dim**=None keepdim dtype", "vector_norm", ragged=norm_ragged, identity=0)
define(torch.linalg.norm, "vector_norm", ragged=linalg_norm_ragged, identity=0)
define(torch.dist, "vector_norm", ragged=dist_ragged)
along(F.normalize, "input p dim**=1 eps", "vector_norm", ragged=normalize_ragged)
define(torch.hash_tensor, "vector_norm", ragged=hash_ragged, identity=0, modes=MAPPED)
