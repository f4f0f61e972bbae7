"""numpy's structured arrays for TensorDicts and back: arrays of records, as in tables and binary files.

    dtype [("xy", "f4", (2,)), ("meta", [("id", "i8")])], shape (3,)
    <->  batch_size [3], {"xy": float32[3, 2], "meta": {"id": int64[3]}}

The fields of records are interleaved in memory. `to_struct_array` copies into them, `as_tensordict` out of them, and
`from_struct_array` takes a field where it lies if torch can step from record to record there. numpy is never imported
here: what is needed comes from the array that is given, or from `Tensor.numpy`.

Invariant: `as_tensordict(to_struct_array(td))` has the keys, dtypes and values of `td`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect
from tdc.core.dtypes import in_numpy
from tdc.core.errors import DtypeError, UnsupportedError, describe, message, refuse_wrong
from tdc.core.keys import parts, show
from tdc.interop.arrays import is_masked
from tdc.tensordict.leaf import unwrap
from tdc.tensordict.nodes import Nodes, Static
from tdc.tensordict.object_array import ObjectArray
from tdc.tensordict.paths import top_keys
from tdc.tensordict.storage import Leaves, subtree
from tdc.tensordict.tensordict import TensorDict

READ, WRITE = "interop.from_struct_array", "interop.to_struct_array"


@cache
def ndarray() -> type[Any]:
    """numpy's class of arrays; torch raises a RuntimeError where numpy is missing."""
    return type(torch.empty(0, device="cpu").numpy())


def is_struct_array(x: Any) -> bool:
    """Whether a value is a numpy array of records, or one record."""
    return getattr(getattr(x, "dtype", None), "names", None) is not None


def from_struct_array(array: Any, *, copy: bool | None = None) -> TensorDict:
    """A TensorDict of the fields of a structured numpy array, without a copy where torch can use their memory.

    It can where records begin at multiples of the field's size, as those of `np.dtype(fields, align=True)` do for every
    field, and numbers are in the order of bytes of this machine.

    Shapes:
        array `(*S)` -> batch size `S`; nested fields become inner nodes.

    Args:
        copy: None copies the fields that torch cannot use where they are, and those that may only be read; False
            refuses them; True copies all of them, as `as_tensordict` does.

    Raises:
        DtypeError: no structured array; fields of dtypes that torch does not have, such as dates; all are named.
        UnsupportedError: `copy=False`, and fields that need one; all are named, and why. A masked array.

    Compile:
        Eager: numpy.

    Example:
        >>> import numpy as np
        >>> a = np.zeros(3, np.dtype([("x", "f4"), ("id", "i8")], align=True))
        >>> td = from_struct_array(a, copy=False)
        >>> a["id"][1] = 7
        >>> td["id"], td.batch_size
        (tensor([0, 7, 0]), torch.Size([3]))
    """
    if not isinstance(array, ndarray()) or array.dtype.names is None:
        hint = "np.zeros(n, [('x', 'f4'), ...]); tdc.TensorDict of a dict of arrays, tdc.as_tensordict of one record"
        raise DtypeError(message(READ, "a structured numpy array", describe(array), hint=hint))
    if is_masked(array):
        raise UnsupportedError(message(READ, "an array without a mask", describe(array), hint="array.filled(value)"))
    if copy is not None:
        expect(READ, copy, bool, of=" or None for copy")
    fields = fields_of(array, "")
    foreign = {name: describe(field) for name, field in fields if not in_torch(field)}
    hint = "array[['x', ...]] of the other fields, or astype('f8') of dates and long doubles"
    refuse_wrong(DtypeError, READ, "fields of dtypes that torch has", foreign, "others", hint)
    if copy is False:
        reasons = {name: why for name, field in fields if (why := reason(field))}
        hint = "leave copy=False out; np.dtype(fields, align=True) for arrays that need no copy"
        refuse_wrong(UnsupportedError, READ, "fields that torch can use in place", reasons, "others", hint)
    return TensorDict(columns(array, copy is not True), array.shape)


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
    expect(WRITE, td, TensorDict)
    wrong = {show(p): describe(x) for p, x in td._leaves.items() if not has_dtype(unwrap(x))}
    wrong |= {show(p): repr(n) for p, n in td._nodes.items() if type(n) is Static}
    hint = "td.exclude(key); .float() of bfloat16, .to_padded().data of ragged leaves"
    refuse_wrong(UnsupportedError, WRITE, "leaves with a numpy dtype", wrong, "others", hint)
    sources = {p: host(unwrap(x)) for p, x in td._leaves.items()}
    out = ndarray()(tuple(td.batch_size), dtype_of(len(td._size), sources, td._nodes))
    for path, source in sources.items():
        target = out
        for key in parts(path):
            target = target[key]
        if isinstance(source, ObjectArray):  # one by one, each as one element even if it is a list
            for i, x in enumerate(source._items):
                target.flat[i] = x
        else:
            target[...] = source
    return out


def columns(array: Any, in_place: bool = False) -> dict[str, Any]:
    """Fields of a structured array, or of one record of it, as entries of a TensorDict. Structured fields are dicts.

    Args:
        in_place: use the memory of fields where torch can.
    """
    if not isinstance(array, ndarray()):  # one record, whose fields are Python objects
        single = ndarray()((), array.dtype)
        single[()] = array
        array = single
    found: dict[str, Any] = {}
    for name in array.dtype.names:
        field = array[name]
        if is_struct_array(field):
            found[name] = columns(field, in_place)
        elif field.dtype.kind in "OUS":
            found[name] = field
        elif in_place and not reason(field):
            found[name] = torch.from_numpy(field)
        else:
            found[name] = field.astype(field.dtype.newbyteorder("="), copy=True)  # the native one
    return found


def fields_of(array: Any, prefix: str) -> list[tuple[str, Any]]:
    """The fields of a structured array that are arrays of numbers or objects, by their paths."""
    found: list[tuple[str, Any]] = []
    for name in array.dtype.names:
        field = array[name]
        nested = fields_of(field, f"{prefix}{name}.") if is_struct_array(field) else [(f"{prefix}{name}", field)]
        found += nested
    return found


def reason(field: Any) -> str:
    """Why torch cannot use a field where it lies; empty where it can."""
    size, dtype = field.dtype.itemsize, field.dtype
    if dtype.kind in "OUS":
        return f"{describe(field)}, objects and no numbers"
    if not dtype.isnative:
        return f"{describe(field)}, in another order of bytes"
    crooked = [n for n, sizes in zip(field.strides, field.shape, strict=True) if sizes > 1 and (n % size or n < 0)]
    if crooked:
        return f"{describe(field)}, in steps of {crooked[0]} bytes, where torch steps by multiples of {size}"
    if not field.flags.aligned:
        return f"{describe(field)}, which begins in between"
    return "" if field.flags.writeable else f"{describe(field)}, which may only be read"


def in_torch(field: Any) -> bool:
    """Whether torch has the dtype of a field, or there is an ObjectArray for it."""
    try:
        torch.from_numpy(ndarray()((0,), field.dtype.newbyteorder("=")))
    except TypeError:
        return field.dtype.kind in "OUS"
    return True


def has_dtype(x: Any) -> bool:
    """Whether numpy has a dtype for a leaf."""
    return isinstance(x, ObjectArray) or (isinstance(x, Tensor) and not x.is_sparse and in_numpy(x.dtype))


def host(x: Any) -> Any:
    """A tensor as a numpy array; an ObjectArray as it is."""
    return x if isinstance(x, ObjectArray) else x.detach().cpu().resolve_conj().resolve_neg().numpy()


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
