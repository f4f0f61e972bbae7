"""Normalisation: layer_norm and rms_norm over static dims, softmax over any one dim, of a TensorDict over a batch dim.

softmax over the ragged dim works on packed values. Padding is filled with -inf, the identity of the maximum that is
subtracted and, exponentiated, of the sum that divides.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import normal_dim
from tdc.core.dtypes import rounded_once
from tdc.core.dynamo import traced_for
from tdc.core.errors import ShapeError, UnsupportedError, message
from tdc.core.typing import Op, OpName
from tdc.layout.segments import reduce_rows, spread
from tdc.layout.structure import Structure
from tdc.ops.layers.positionwise import last_is_static, positionwise
from tdc.ops.rectangle import repacked
from tdc.ops.tensordict.batch import along
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor, build_result
from tdc.ragged.storage import Ragged, axis_of, data_of, feature_axis, with_data


def check_normalized(op: OpName, input: Ragged, normalized_shape: Any, *rest: Any, **kw: Any) -> None:
    """A ShapeError where one of the dims is not static."""
    last_is_static(input, op, len(normalized_shape))


def ascending(x: MaskedBatch) -> Tensor:
    """Data with 1, 2, ... along the last dim in padding: neither its norm nor its variance is 0, whatever `eps` is."""
    return torch.where(x.mask, x.data, torch.arange(1, x.data.shape[-1] + 1, device=x.device)).to(x.dtype)


def softmax(op: Op, x: Any, dim: int | None = None, *args: Any, dtype: Any = None, **_: Any) -> Ragged:
    """Also `log_softmax`. The dtype may come by position, behind another argument in `torch.nn.functional`.

    In a padded batch an example without real elements becomes 0, not NaN.
    """
    dtype = dtype_of(args, dtype)
    if (axis := feature_axis(x, dim)) is not None:
        return build_result(x._structure, op(x._values, axis, dtype=dtype))
    d = normal_dim(given(dim, x.ndim, op), x.ndim, op)
    if d == x._batch_dim:
        raise UnsupportedError(message(op, "a static or ragged dim", "the batch", hint="x.to_padded().filled(-inf)"))
    if d not in x.ragged_dims:
        return with_data(x, op(data_of(x), axis_of(op, x, d), dtype=dtype))
    if isinstance(x, NestedTensor) and x._structure.ragged_ndim == 1:
        s = x._structure
        log = op is torch.log_softmax
        out = rounded_once(lambda v: softmax_rows(v, s, log), x.values.movedim(s.packed_dim, 0), dtype)
        return x.with_values(out.movedim(0, s.packed_dim))
    padded = x.to_padded() if isinstance(x, NestedTensor) else x
    padded = padded if dtype is None else padded.to(dtype)
    some = (padded.lengths > 0).all(1).view([-1 if i == x._batch_dim else 1 for i in range(x.ndim)])
    filled = padded.filled(-math.inf).masked_fill(~some, 0)
    return repacked(rounded_once(lambda v: op(v, d), filled), x)


def softmax_rows(x: Tensor, s: Structure, log: bool) -> Tensor:
    """Softmax or log-softmax of each example of a packed batch, (N, *D) -> (N, *D)."""
    total = x.shape[0]
    shifted = x - spread(reduce_rows(x.detach(), s, "amax", -math.inf), s, total)
    sums = reduce_rows(shifted.exp(), s, "sum", 0)
    below = spread(sums.log() if log else sums, s, total)
    return shifted - below if log else shifted.exp() / below


def dtype_of(args: tuple[Any, ...], dtype: Any) -> torch.dtype | None:
    """The dtype of a call, by name or by position."""
    return next((a for a in args if isinstance(a, torch.dtype)), dtype) if args else dtype


def softmin_ragged(input: Any, dim: int | None = None, *args: Any, dtype: Any = None, **_: Any) -> Ragged | Tensor:
    return F.softmax(input.neg(), given(dim, input.ndim, F.softmin), dtype=dtype_of(args, dtype))


def given(dim: int | None, ndim: int, op: Op) -> int:
    """The dim, which torch lets one leave out with a warning and we do not."""
    if dim is None:
        raise ShapeError(message(op, f"a dim in [{-ndim}, {ndim - 1}]", "None", hint="name the dim, e.g. dim=-1"))
    if isinstance(dim, (tuple, list, str)):
        raise ShapeError(message(op, "one dim", f"{dim}", hint="name one dim, e.g. dim=-1"))
    return dim


@traced_for(F.rms_norm)
def rms_norm_traced(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Ragged | Tensor:
    """`F.rms_norm` in graphs: Dynamo of torch 2.11 breaks in torch's own without a weight."""
    return torch.rms_norm(input, normalized_shape, weight, eps)


positionwise(F.layer_norm, "norm", check_normalized, fill=ascending)
positionwise(F.rms_norm, "norm", check_normalized, fill=ascending, aliases=(torch.rms_norm,))
for _op, _alias in ((torch.softmax, F.softmax), (torch.log_softmax, F.log_softmax)):
    _impl = partial(softmax, _op)
    along(_op, "input dim* dtype", "norm", ragged=_impl, identity=-math.inf, aliases=[_alias])
along(F.softmin, "input dim* dtype", "norm", ragged=softmin_ragged, identity=math.inf)
