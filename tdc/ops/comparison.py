"""Questions about whole batches, answered by one Python bool or int: equal, allclose, is_same_size, numel.

Invariants: `equal` and `allclose` read the data on the host, so they are for eager code; `(a == b).all()` stays a
tensor. Other containers, keys, sizes or lengths make batches unequal; they are no error.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tdc.core.dynamo import trace_as
from tdc.core.errors import DtypeError, TdcError, UnsupportedError, describe, message, op_name
from tdc.core.rules import define
from tdc.core.typing import Op
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.tensordict.leaf import unwrap
from tdc.tensordict.nodes import statics
from tdc.tensordict.object_array import ObjectArray
from tdc.tensordict.tensordict import TensorDict

EAGER = ("eager", "grad")


def agree(op: Op, a: Any, b: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether two operands are of one kind, laid out alike, and `op` holds for them.

    Raises:
        DtypeError: dtypes that `allclose` does not compare.
        UnsupportedError: their values cannot be read, under vmap or export; a registered leaf without such a function.
    """
    if type(a) is not type(b) and not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    if isinstance(a, TensorDict):
        return agree_tensordict(op, a, b, *args, **kwargs)
    if isinstance(a, NestedTensor):
        return agree_nested(op, a, b, *args, **kwargs)
    if isinstance(a, MaskedBatch):
        return agree_masked(op, a, b, *args, **kwargs)
    if a.shape != b.shape:
        return False
    if isinstance(unwrap(a), ObjectArray):
        return isinstance(unwrap(b), ObjectArray) and bool((unwrap(a) == unwrap(b)).all())
    if a.dtype != b.dtype and op is torch.allclose:
        got = f"{describe(a)} and {describe(b)}"
        raise DtypeError(message(op, "leaves of one dtype", got, hint="convert one of them with .to(dtype)"))
    return read(op, op, a, b, *args, **kwargs)


def read(op: Op, run: Op, a: Any, b: Any, *args: Any, **kwargs: Any) -> bool:
    """What `run` says of two tensors, on behalf of `op`."""
    try:
        return answer(op, run, a, b, *args, **kwargs)
    except TdcError:
        raise
    except RuntimeError as error:
        raise unread(op) from error


def answer(op: Op, run: Op, a: Any, b: Any, *args: Any, **kwargs: Any) -> bool:
    """A number of Python, read from the data."""
    return run(a, b, *args, **kwargs)


def no_answer(op: Op, run: Op, a: Any, b: Any, *args: Any, **kwargs: Any) -> bool:
    """What Dynamo traces in place of `answer`, in words of ours."""
    raise unread(op)


def unread(op: Op) -> UnsupportedError:
    """The error for values that are not there yet."""
    hint = "(a == b).all() stays a tensor"
    return UnsupportedError(message(op, "values that can be read", "traced or mapped ones", hint=hint))


trace_as(answer, no_answer)


def agree_tensordict(op: Op, a: TensorDict, b: Any, *args: Any, **kwargs: Any) -> bool:
    if a.batch_size != b.batch_size or a._leaves.keys() != b._leaves.keys() or statics(a._nodes) != statics(b._nodes):
        return False
    return all([agree(op, x, b._leaves[p], *args, **kwargs) for p, x in a._leaves.items()])


def agree_nested(op: Op, a: NestedTensor, b: Any, *args: Any, **kwargs: Any) -> bool:
    s, t = a.structure, b.structure
    if (s.packed_dim, s.batch_dim, s.ragged_ndim) != (t.packed_dim, t.batch_dim, t.ragged_ndim):
        return False
    same = s is t or read(op, torch.equal, a.sizes, b.sizes)
    return same and agree(op, a.values, b.values, *args, **kwargs)


def agree_masked(op: Op, a: MaskedBatch, b: Any, *args: Any, **kwargs: Any) -> bool:
    """Padding does not count, the size of the rectangle does."""
    if (a.ragged_dims, a.batch_dim) != (b.ragged_dims, b.batch_dim):
        return False
    same = read(op, torch.equal, a.lengths, b.lengths)
    return same and agree(op, a.filled(0), b.filled(0), *args, **kwargs)


def is_same_size_tensordict(a: Any, b: Any) -> bool:
    """The same keys, and leaves of the same sizes."""
    if not isinstance(a, TensorDict) or not isinstance(b, TensorDict) or a.batch_size != b.batch_size:
        return False
    if a._leaves.keys() != b._leaves.keys():
        return False
    return all([x.shape == b._leaves[p].shape for p, x in a._leaves.items()])


def is_same_size_ragged(a: Any, b: Any) -> bool:
    """The same sizes and lengths."""
    if type(a) is not type(b) or a.shape != b.shape or a.ragged_dims != b.ragged_dims or a._batch_dim != b._batch_dim:
        return False
    if isinstance(a, MaskedBatch):
        return a.lengths is b.lengths or read(torch.is_same_size, torch.equal, a.lengths, b.lengths)
    return a.structure is b.structure or read(torch.is_same_size, torch.equal, a.sizes, b.sizes)


def numel(x: Any) -> int:
    """Of a TensorDict the number of examples; of packed rows that of real elements, of padded ones the rectangle."""
    return x.data.numel() if isinstance(x, MaskedBatch) else x.numel()


def dtype_is(name: str, x: Any) -> bool:
    """Of a TensorDict whether it is so of every leaf."""
    if isinstance(x, TensorDict):
        return all([getattr(leaf.dtype, name, False) for leaf in x._leaves.values()])
    return getattr(x.dtype, name)


TOLD = ("eager", "compile", "grad", "export")  # vmap returns tensors only
for _op in (torch.is_floating_point, torch.is_complex, torch.is_signed):
    _impl = partial(dtype_is, op_name(_op))
    define(_op, "comparison", ragged=_impl, tensordict=_impl, modes=TOLD)
for _op in (torch.equal, torch.allclose):
    define(_op, "comparison", ragged=partial(agree, _op), tensordict=partial(agree, _op), modes=EAGER)
define(torch.numel, "comparison", ragged=numel, tensordict=numel, modes=TOLD)
define(torch.is_same_size, "comparison", masked=is_same_size_ragged, tensordict=is_same_size_tensordict, modes=TOLD)
define(torch.is_same_size, "comparison", nested=is_same_size_ragged, modes=("eager", "compile", "grad"))
