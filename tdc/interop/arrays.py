"""Arrays of other libraries as leaves and back, without a copy, through DLPack: numpy, JAX, CuPy and their kin.

    from_dlpack({"x": array, "meta": {"id": array}}, [3])       the memory of the arrays
    to_dlpack(td, numpy.from_dlpack)                            nested dicts of arrays, the memory of the leaves

No library is imported here: an array says itself how it is read, and `into` is the function that reads a tensor.

Invariant: what says that it may only be read never becomes a tensor that is written to; it is copied or refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect, expect_function
from tdc.core.container import Container
from tdc.core.errors import DtypeError, UnsupportedError, describe, dtype_name, first_line, refuse_wrong
from tdc.core.keys import as_path, show
from tdc.core.typing import KeyPath
from tdc.tensordict.leaf import unwrap
from tdc.tensordict.nodes import Static
from tdc.tensordict.paths import join
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
    refuse_wrong(DtypeError, READ, "nested mappings of arrays", kinds, "values that are none", hint)
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
    """Whether an array of numpy has a mask, which a tensor cannot have."""
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
    """Whether an array steps backwards in memory, as `array[::-1]` of numpy does."""
    strides: Any = getattr(x, "strides", None)
    return isinstance(strides, tuple) and any([n < 0 for n in strides])


def is_read_only(x: Any) -> bool:
    """Whether an array says that it may not be written to."""
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
