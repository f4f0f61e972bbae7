"""numpy's structured arrays for TensorDicts and back: arrays of records, as in tables and binary files.

    dtype [("xy", "f4", (2,)), ("meta", [("id", "i8")])], shape (3,)
    <->  batch_size [3], {"xy": float32[3, 2], "meta": {"id": int64[3]}}

The fields of records are interleaved in memory, so both directions copy. numpy is never imported here: what is needed
comes from the array that is given, or from `Tensor.numpy`.

Invariant: `as_tensordict(to_struct_array(td))` has the keys, dtypes and values of `td`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect
from tdc.core.errors import UnsupportedError, describe, refuse_wrong
from tdc.core.keys import parts, show
from tdc.tensordict.leaf import unwrap
from tdc.tensordict.nodes import Nodes, Static
from tdc.tensordict.object_array import ObjectArray, ints
from tdc.tensordict.paths import top_keys
from tdc.tensordict.storage import Leaves, subtree
from tdc.tensordict.tensordict import TensorDict


def is_struct_array(x: Any) -> bool:
    """Whether a value is a numpy array of records, or one record."""
    return getattr(getattr(x, "dtype", None), "names", None) is not None


def to_struct_array(td: TensorDict) -> Any:
    """A structured numpy array of the batch size, one field for each leaf, a structured one for each inner node.

    Tensors are copied to the host and detached. Empty inner nodes become fields of size 0.

    Raises:
        UnsupportedError: leaves without a numpy dtype: ragged ones, bfloat16, registered classes, Static values; all
            are named.

    Compile:
        Eager: numpy.

    Example:
        >>> a = to_struct_array(TensorDict({"xy": torch.zeros(3, 2), "meta": {"id": torch.arange(3)}}, [3]))
        >>> a["meta"]["id"].tolist(), a.dtype.names
        ([0, 1, 2], ('xy', 'meta'))
    """
    expect("interop.to_struct_array", td, TensorDict)
    wrong = {show(p): describe(x) for p, x in td._leaves.items() if not has_dtype(unwrap(x))}
    wrong |= {show(p): repr(n) for p, n in td._nodes.items() if type(n) is Static}
    hint = "td.exclude(key); .float() of bfloat16, .to_padded().data of ragged leaves"
    refuse_wrong(UnsupportedError, "interop.to_struct_array", "leaves with a numpy dtype", wrong, "others", hint)
    sources = {p: host(unwrap(x)) for p, x in td._leaves.items()}
    out = ndarray()(tuple(td.batch_size), dtype_of(td.ndim, sources, td._nodes))
    for path, source in sources.items():
        target = out
        for key in parts(path):
            target = target[key]
        if isinstance(source, ObjectArray):  # one by one, each as one element even if it is a list
            for i, position in enumerate(ints(source._positions)):
                target.flat[i] = source._items[position]
        else:
            target[...] = source
    return out


def ndarray() -> type[Any]:
    """numpy's class of arrays, without importing numpy."""
    return type(torch.empty(0).numpy())


def columns(array: Any) -> dict[str, Any]:
    """Fields of a structured array, or of one record of it, as entries of a TensorDict. Structured fields are dicts."""
    if not isinstance(array, ndarray()):  # one record, whose fields are Python objects
        single = ndarray()((), array.dtype)
        single[()] = array
        array = single
    found: dict[str, Any] = {}
    for name in array.dtype.names:
        field = array[name]
        if is_struct_array(field):
            found[name] = columns(field)
        elif field.dtype.kind in "OUS":
            found[name] = field
        else:
            found[name] = field.astype(field.dtype.newbyteorder("="), copy=True)  # the native one
    return found


def has_dtype(x: Any) -> bool:
    """Whether numpy has a dtype for a leaf."""
    return isinstance(x, ObjectArray) or (isinstance(x, Tensor) and x.dtype != torch.bfloat16 and not x.is_sparse)


def host(x: Any) -> Any:
    """A tensor as a numpy array; an ObjectArray as it is."""
    return x if isinstance(x, ObjectArray) else x.detach().cpu().numpy()


def dtype_of(ndim: int, leaves: Leaves, nodes: Nodes) -> list[Any]:
    """The fields of a structured dtype: name, dtype, and shape beyond the batch."""
    fields: list[Any] = []
    for key in top_keys([*leaves, *nodes]):
        x = leaves.get(key)
        if x is None:
            found, inner, _ = subtree(leaves, nodes, key)
            fields.append((key, dtype_of(ndim, found, inner)))
        else:
            fields.append((key, "O" if isinstance(x, ObjectArray) else x.dtype, tuple(x.shape[ndim:])))
    return fields
