"""Questions about whole batches, answered by one Python bool or int: equal, allclose, is_same_size, numel.

`equal` and `allclose` read the data on the host, so they are for eager code; `(a == b).all()` stays a tensor. Other
containers, keys, sizes or lengths make batches unequal.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from tdc.core.dynamo import traced_for
from tdc.core.errors import DtypeError, TdcError, UnsupportedError, describe, message, op_name
from tdc.core.rules import define, note_syncs
from tdc.core.typing import Op
from tdc.ops.reduce.reduction import filled
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.storage import data_of, fitted, is_ragged, ragged_sizes
from tdc.tensordict.leaf import unwrap
from tdc.tensordict.nodes import statics
from tdc.tensordict.object_array import ObjectArray
from tdc.tensordict.shared import Shared, without_shared
from tdc.tensordict.tensordict import TensorDict

EAGER = ("eager", "grad")


def agree(op: Op, a: Any, b: Any, *args: Any, **kwargs: Any) -> bool:
    """True if two operands are of one kind, laid out alike, and `op` holds for them; padding does not count.

    `allclose` takes a dense tensor beside a ragged batch, which broadcasts.
    """
    if isinstance(a, TensorDict) and isinstance(b, TensorDict):
        same = same_keys(a, b) and statics(a._nodes) == statics(b._nodes)
        return same and all([agree(op, x, b._leaves[p], *args, **kwargs) for p, x in a._leaves.items()])
    ragged = len([x for x in (a, b) if is_ragged(x)])
    if ragged == 2:
        if type(a) is not type(b) or not laid_alike(op, a, b):
            return False
        return agree(op, *[data_of(filled(x, 0)) for x in (a, fitted(op, a, b))], *args, **kwargs)
    tensors = len([x for x in (a, b) if isinstance(x, Tensor)])
    broadcast = op is torch.allclose and ragged == tensors == 1
    if not broadcast and ((type(a) is not type(b) and tensors < 2) or a.shape != b.shape):
        return False
    if type(a) is Shared:
        return agree(op, a.value, b.value, *args, **kwargs)
    if isinstance(unwrap(a), ObjectArray):
        return isinstance(unwrap(b), ObjectArray) and bool((unwrap(a) == unwrap(b)).all())
    if a.dtype != b.dtype and op is torch.allclose:
        got = f"{describe(a)} and {describe(b)}"
        raise DtypeError(message(op, "leaves of one dtype", got, hint="convert one of them with .to(dtype)"))
    return read(op, close if broadcast else op, a, b, *args, **kwargs)


def close(a: Any, b: Any, *args: Any, **kwargs: Any) -> bool:
    """`allclose` of operands that broadcast."""
    return bool(torch.isclose(a, b, *args, **kwargs).all())


def read(op: Op, run: Op, a: Any, b: Any, *args: Any, **kwargs: Any) -> bool:
    """The answer of `run` for two tensors; an UnsupportedError where their values cannot be read."""
    try:
        return run(a, b, *args, **kwargs)
    except TdcError:
        raise
    except RuntimeError as error:
        raise unread(op) from error


@traced_for(read)
def read_traced(op: Op, *args: Any, **kwargs: Any) -> NoReturn:
    raise unread(op)


def unread(op: Op) -> UnsupportedError:
    """The error for values that are not there yet."""
    hint = "(a == b).all() stays a tensor"
    return UnsupportedError(message(op, "values that can be read", "traced or mapped ones", hint=hint))


def same_keys(a: TensorDict, b: TensorDict) -> bool:
    return a.batch_size == b.batch_size and a._leaves.keys() == b._leaves.keys()


def laid_alike(op: Op, a: Any, b: Any) -> bool:
    """True if two ragged batches of one container have the same ragged dims, and examples of the same sizes."""
    if (a.ragged_dims, a._batch_dim) != (b.ragged_dims, b._batch_dim):
        return False
    return a._same_structure(b) or read(op, torch.equal, ragged_sizes(a), ragged_sizes(b))


def is_same_size(a: Any, b: Any) -> bool:
    """The same sizes and lengths; of TensorDicts the same keys, and leaves of the same sizes."""
    if type(a) is not type(b) and not (isinstance(a, TensorDict) and isinstance(b, TensorDict)):
        return False
    if isinstance(a, TensorDict):
        return same_keys(a, b) and all([x.shape == b._leaves[p].shape for p, x in a._leaves.items()])
    return a.shape == b.shape and laid_alike(torch.is_same_size, a, b)


def numel(x: Any) -> int:
    """Of a TensorDict the number of examples; of packed rows that of real elements, of padded ones the rectangle."""
    return x.data.numel() if isinstance(x, MaskedBatch) else x.numel()


def dtype_is(name: str, x: Any) -> bool:
    """A question about a dtype; for a TensorDict True if it holds for every leaf."""
    if isinstance(x, TensorDict):
        return all([getattr(leaf.dtype, name, False) for leaf in without_shared(x._leaves).values()])
    return getattr(x.dtype, name)


TOLD = ("eager", "compile", "grad", "export")  # vmap returns tensors only
for _op in (torch.is_floating_point, torch.is_complex, torch.is_signed):
    _impl = partial(dtype_is, op_name(_op))
    define(_op, "comparison", ragged=_impl, tensordict=_impl, modes=TOLD)
for _op in (torch.equal, torch.allclose):
    define(_op, "comparison", ragged=partial(agree, _op), tensordict=partial(agree, _op), modes=EAGER)
define(torch.numel, "comparison", ragged=numel, tensordict=numel, modes=TOLD)
define(torch.is_same_size, "comparison", masked=is_same_size, tensordict=is_same_size, modes=TOLD)
define(torch.is_same_size, "comparison", nested=is_same_size, modes=("eager", "compile", "grad"))
note_syncs("the answer", torch.equal, torch.allclose)
note_syncs("whether sizes are equal", torch.is_same_size, kinds=("nested", "masked"))
