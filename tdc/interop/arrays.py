"""Arrays of other libraries as leaves and back: numpy, JAX, CuPy through DLPack, and numpy's structured arrays.

    from_dlpack({"x": array, "meta": {"id": array}}, [3])       the memory of the arrays
    to_dlpack(td, numpy.from_dlpack)                            nested dicts of arrays, the memory of the leaves
    from_struct_array(array)        dtype [("xy", "f4", (2,)), ("meta", [("id", "i8")])], shape (3,)
    to_struct_array(td)             <->  batch_size [3], {"xy": float32[3, 2], "meta": {"id": int64[3]}}

No library is imported here: an array says itself how it is read, and `into` is the function that reads a tensor. The
fields of records are interleaved in memory. `from_struct_array` takes a field where it is if torch can step from record
to record there.

Invariants:
  - what says that it may only be read never becomes a tensor that is written to; it is copied or refused;
  - `as_tensordict(to_struct_array(td))` has the keys, dtypes and values of `td`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect, expect_function
from tdc.core.container import Container
from tdc.core.dtypes import in_numpy
from tdc.core.errors import DtypeError, UnsupportedError, describe, dtype_name, first_line, message, refuse_wrong
from tdc.core.keys import as_path, parts, show
from tdc.core.typing import KeyPath
from tdc.tensordict.leaf import unwrap
from tdc.tensordict.nodes import Nodes, Static
from tdc.tensordict.object_array import ObjectArray
from tdc.tensordict.paths import join, top_keys
from tdc.tensordict.shared import Shared
from tdc.tensordict.storage import Leaves, subtree
from tdc.tensordict.tensordict import TensorDict, build_td

READ, WRITE = "interop.from_dlpack", "interop.to_dlpack"
VERSIONED = b"dltensor_versioned"  # the name of a capsule of DLPack 1, which has flags
FLAGS_AT, READ_ONLY = 24, 1  # behind version, context and deleter; the first bit
FAULTS = (BufferError, RuntimeError, TypeError, ValueError, NotImplementedError)
python: Any = ctypes.pythonapi  # whose own functions stay as they are, since all libraries share them
is_capsule = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", python))
pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", python))


def from_dlpack(arrays: Mapping[Any, Any], batch_size: Any = (), *, copy: bool | None = None) -> TensorDict:
    """A TensorDict of the memory of arrays, whichever library they are of.

    Args:
        arrays: nested mappings of what has `__dlpack__`; tensors, ragged batches and Static values pass as they are.
        batch_size: the leading sizes that all share.
        copy: None copies only arrays that go backwards in memory, as `array[::-1]` does, and those that say that they
            may not be written to, as numpy's do with `flags.writeable` and others in DLPack 1; False refuses these;
            True copies everything. Arrays of JAX never change and do not say so: give True for leaves that `tdc.copy_`
            is to write into.

    Raises:
        UnsupportedError: arrays that torch cannot take, such as texts or bytes in another order; all are named.
        DtypeError: values that are no arrays; no mapping.
        ShapeError: arrays that do not begin with the batch size.

    Compile:
        Eager only.

    Example:
        >>> import numpy as np
        >>> a = np.zeros(3, dtype=np.float32)
        >>> td = from_dlpack({"x": a, "meta": {"id": np.arange(3)}}, [3])
        >>> a[1] = 5
        >>> td["x"], td["meta", "id"].dtype
        (tensor([0., 5., 0.]), torch.int64)
    """
    expect(READ, arrays, Mapping, of=" of arrays")
    if copy is not None:
        expect(READ, copy, bool, of=" or None for copy")
    kinds: dict[str, str] = {}
    faults: dict[str, str] = {}
    entries = taken(arrays, (), copy, kinds, faults)
    hint = "arrays with __dlpack__; tdc.TensorDict(...) takes lists and numbers, Static(x) any object"
    refuse_wrong(DtypeError, READ, "nested mappings of arrays", kinds, "values that are not", hint)
    expected = "arrays that torch can use in place" if copy is False else "arrays that torch has a dtype for"
    hint = "leave copy=False out" if copy is False else "array.astype(...) of a dtype and byte order that torch has"
    refuse_wrong(UnsupportedError, READ, expected, faults, "others", hint)
    return TensorDict(entries, batch_size)


def to_dlpack(td: TensorDict, into: Callable[[Any], Any]) -> dict[str, Any]:
    """Nested dicts of arrays of another library, which are the memory of the leaves.

    Args:
        into: reads one tensor, as `numpy.from_dlpack` or `jax.dlpack.from_dlpack`. Static values and ObjectArrays pass.

    Raises:
        UnsupportedError: leaves that require a gradient, ragged ones, and those that the library does not take, such
            as bfloat16 in numpy; all are named.
        DtypeError: the library made another dtype of a leaf, as JAX makes int32 of int64 without `jax_enable_x64`.

    Compile:
        Eager only.

    Example:
        >>> import numpy as np
        >>> td = TensorDict({"x": torch.zeros(3)}, [3])
        >>> td["x"][1] = 5.0
        >>> to_dlpack(td, np.from_dlpack)
        {'x': array([0., 5., 0.], dtype=float32)}
    """
    expect(WRITE, td, TensorDict)
    expect_function(WRITE, into)
    faults: dict[str, str] = {}
    changed: dict[str, str] = {}
    found: dict[Any, Any] = {}
    for path, leaf in td._leaves.items():
        x = unwrap(leaf)
        found[path] = given(x, into, show(path), faults, changed) if isinstance(x, (Tensor, Container)) else x
    hint = "td.detach() of gradients, td.float() of bfloat16, x.to_padded().data of ragged leaves, or td.exclude(key)"
    refuse_wrong(UnsupportedError, WRITE, "leaves that the library takes", faults, "others", hint)
    hint = "td.to(dtype), or jax.config.update('jax_enable_x64', True)"
    refuse_wrong(DtypeError, WRITE, "arrays of the dtypes of the leaves", changed, "that were converted", hint)
    return build_td(found, td._nodes, td._size, None).to_dict()


def taken(
    arrays: Mapping[Any, Any], prefix: KeyPath, copy: bool | None, kinds: dict[str, str], faults: dict[str, str]
) -> dict[Any, Any]:
    """Arrays as entries of a TensorDict; a line in `kinds` or `faults` of each that cannot be one."""
    found: dict[Any, Any] = {}
    for key, x in arrays.items():
        path = join(prefix, as_path(key, READ))
        if isinstance(x, Mapping):
            found[key] = taken(x, path, copy, kinds, faults)
        elif isinstance(x, (Tensor, Container, Static)):
            found[key] = torch.clone(x) if copy and not isinstance(x, Static) else x  # type: ignore[arg-type]  # it dispatches
        elif not hasattr(x, "__dlpack__"):
            kinds[show(path)] = describe(x)
        elif is_masked(x):
            faults[show(path)] = f"{describe(x)}, with a mask: array.filled(value)"
        elif copy is False and (is_read_only(x) or is_backwards(x)):
            why = "goes backwards in memory, which torch cannot" if is_backwards(x) else "may only be read"
            faults[show(path)] = f"{describe(x)}, which {why}"
        else:
            try:
                found[key] = tensor_of(x, copy)
            except FAULTS as error:
                faults[show(path)] = f"{describe(x)}: {first_line(error)}"
    return found


def is_masked(x: Any) -> bool:
    """True if an array of numpy has a mask, which a tensor cannot have."""
    return hasattr(x, "mask") and hasattr(x, "filled")


def tensor_of(x: Any, copy: bool | None) -> Tensor:
    """An array as a tensor; a copy where it may only be read or goes backwards, which ends the process in torch."""
    if is_backwards(x):
        if not hasattr(x, "copy"):
            raise BufferError("steps below 0")
        return torch.from_dlpack(x.copy())
    out = torch.from_dlpack(x)
    return out.clone() if copy or (copy is None and is_read_only(x)) else out


def is_backwards(x: Any) -> bool:
    """True if an array steps backwards in memory, as `array[::-1]` of numpy does."""
    strides: Any = getattr(x, "strides", None)
    return isinstance(strides, tuple) and any([n < 0 for n in strides])


def is_read_only(x: Any) -> bool:
    """True if an array says that it may not be written to."""
    flags: Any = getattr(x, "flags", None)
    if hasattr(flags, "writeable"):
        return not flags.writeable
    try:
        capsule = x.__dlpack__(max_version=(1, 0))
    except FAULTS:
        return False
    if not is_capsule(capsule, VERSIONED):
        return False
    return bool(ctypes.c_uint64.from_address(pointer_in(capsule, VERSIONED) + FLAGS_AT).value & READ_ONLY)


def given(x: Any, into: Callable[[Any], Any], path: str, faults: dict[str, str], changed: dict[str, str]) -> Any:
    """A leaf as an array; a line in `faults` or `changed` where it is not the same."""
    if not isinstance(x, Tensor):
        faults[path] = describe(x)
    elif x.requires_grad:
        faults[path] = f"{describe(x)}, which requires a gradient"
    elif x.is_neg():  # which torch would forget
        faults[path] = f"{describe(x)}, which is negated as it is read: x.resolve_neg()"
    else:
        try:
            out = into(x)
        except Exception as error:  # each library has errors of its own
            faults[path] = f"{describe(x)}: {first_line(error)}"
            return None
        dtype = str(getattr(out, "dtype", dtype_name(x.dtype)))
        if dtype.rpartition(".")[2] != dtype_name(x.dtype):
            changed[path] = f"{describe(x)}, as {dtype}"
        return out
    return None


READ_FIELDS, WRITE_FIELDS = "interop.from_struct_array", "interop.to_struct_array"


@cache
def ndarray() -> type[Any]:
    """numpy's class of arrays; torch raises a RuntimeError where numpy is missing."""
    return type(torch.empty(0, device="cpu").numpy())


def is_struct_array(x: Any) -> bool:
    """True if a value is a numpy array of records, or one record."""
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
        raise DtypeError(message(READ_FIELDS, "a structured numpy array", describe(array), hint=hint))
    if is_masked(array):
        hint = "array.filled(value)"
        raise UnsupportedError(message(READ_FIELDS, "an array without a mask", describe(array), hint=hint))
    if copy is not None:
        expect(READ_FIELDS, copy, bool, of=" or None for copy")
    fields = fields_of(array, "")
    foreign = {name: describe(field) for name, field in fields if not in_torch(field)}
    hint = "array[['x', ...]] of the other fields, or astype('f8') of dates and long doubles"
    refuse_wrong(DtypeError, READ_FIELDS, "fields of dtypes that torch has", foreign, "others", hint)
    if copy is False:
        reasons = {name: why for name, field in fields if (why := reason(field))}
        hint = "leave copy=False out; np.dtype(fields, align=True) for arrays that need no copy"
        refuse_wrong(UnsupportedError, READ_FIELDS, "fields that torch can use in place", reasons, "others", hint)
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
    expect(WRITE_FIELDS, td, TensorDict)
    wrong = {show(p): describe(x) for p, x in td._leaves.items() if type(x) is Shared or not has_dtype(unwrap(x))}
    wrong |= {show(p): repr(n) for p, n in td._nodes.items() if type(n) is Static}
    hint = "td.exclude(key); .float() of bfloat16, .to_padded().data of ragged leaves"
    refuse_wrong(UnsupportedError, WRITE_FIELDS, "leaves with a numpy dtype", wrong, "others", hint)
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
    """True if torch has the dtype of a field, or there is an ObjectArray for it."""
    try:
        torch.from_numpy(ndarray()((0,), field.dtype.newbyteorder("=")))
    except TypeError:
        return field.dtype.kind in "OUS"
    return True


def has_dtype(x: Any) -> bool:
    """True if numpy has a dtype for a leaf."""
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
