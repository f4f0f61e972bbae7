"""Checks of arguments before anything reads them, so that no error comes from inside.

Invariant: metadata only. A graph keeps the checks of containers and of constants.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from difflib import get_close_matches
from types import EllipsisType, NoneType
from typing import Any

import torch
from torch.nn import Module

from tdc.core.dynamo import constant, is_symbol, skipped_in_graphs, traced_for
from tdc.core.errors import (
    DtypeError,
    IndexingError,
    KeyPathError,
    ShapeError,
    UnsupportedError,
    describe,
    first_line,
    message,
    show_size,
)
from tdc.core.typing import OpName

ARGUMENTS = ("batch_size", "batch_shape", "batch_dims")
MEANT = {"batch_shape": "batch_size", "batch_dims": "batch_size"}
LISTED = "['a'] for one key, ['a', ('b', 'c')] for several"
MADE = {
    "TensorDict": "TensorDict({'key': tensor}, batch_size=[...]), or tdc.as_tensordict(obj)",
    "NestedTensor": "tdc.pack([tensor, ...]) makes one",
    "TwoLevelTensor": "tdc.pack([nested, ...]) makes one",
    "MaskedBatch": "tdc.from_padded(data, lengths=lengths) makes one",
    "Tensor": "torch.as_tensor(x) makes one",
    "Mapping": "pass a dict",
    "dict": "pass a dict",
    "Module": "an nn.Module, such as nn.Linear(2, 1)",
    "type": "pass the class itself",
    "bool": "True or False",
    "dtype": "a dtype, e.g. torch.float32",
}
SWAPPED = "swap the two arguments"


def expect(op: str, x: Any, *classes: type, of: str = "", other: Any = None) -> None:
    """Refuse an argument that is an instance of none of these classes.

    Args:
        of: what the argument is, where the class does not say it.
        other: the argument that it may have been swapped with.

    Raises:
        DtypeError: it is of another class.

    Example:
        >>> from torch import Tensor
        >>> expect("scale", [1.0], Tensor, of=" of weights")
        Traceback (most recent call last):
        tdc.DtypeError: tdc.scale: expected a Tensor of weights, got list
        hint: torch.as_tensor(x) makes one
    """
    if not isinstance(x, classes):
        names = [cls.__name__ for cls in classes]
        made = "tdc.from_module(net)" if isinstance(x, Module) and names[0] == "TensorDict" else MADE[names[0]]
        hint = SWAPPED if isinstance(other, classes) else made
        raise DtypeError(message(op, f"a {' or a '.join(names)}{of}", describe(x), hint=hint))


@skipped_in_graphs  # which cannot make this check
def expect_function(op: str, *fns: Any) -> None:
    """Refuse objects that cannot be called, with a DtypeError."""
    for fn in fns:
        if not callable(fn):
            raise DtypeError(message(op, "a function", describe(fn), hint="the function itself, e.g. torch.relu"))


def expect_number(op: OpName, *numbers: Any, whole: bool = False) -> None:
    """Refuse with a DtypeError all but (whole) numbers; tensors and arrays without dims are numbers."""
    for x in numbers:
        real = getattr(getattr(x, "dtype", None), "is_floating_point", False)  # a tensor has all methods of numbers
        is_number = hasattr(x, "__index__") and not real if whole else hasattr(x, "__float__")
        truth = whole and (isinstance(x, bool) or getattr(x, "dtype", None) == torch.bool)
        if isinstance(x, str) or truth or not is_number or getattr(x, "ndim", 0):
            hint = "int(x)" if truth else "a Python number"
            raise DtypeError(message(op, "an int" if whole else "a number", describe(x), hint=hint))


def expect_at_least(op: OpName, least: int, name: str, *numbers: Any) -> None:
    """Refuse all but ints with a DtypeError, and an int below `least` with a ShapeError."""
    expect_number(op, *numbers, whole=True)
    if any([n < least for n in numbers]):
        raise ShapeError(message(op, f"{name} of {least} or more", shown(min(numbers)), hint=f"{name}={max(least, 1)}"))


def int_tuple(op: OpName, given: Any) -> tuple[int, ...]:
    """One int, or a tuple or list of ints, as a tuple."""
    if type(given) is int:
        return (given,)
    found: Any = given
    ints = tuple(found) if isinstance(given, (tuple, list)) else (found,)
    expect_number(op, *ints, whole=True)
    return ints


def is_infinite(x: float) -> bool:
    """True if a number is an infinity; of a symbol torch answers `x == inf` with False."""
    return abs(x) > sys.float_info.max


def shown(n: int) -> str:
    """A number in the text of an assertion; a symbol of a graph is called n."""
    return f"{n}"


@traced_for(shown)
def shown_traced(n: int) -> str:
    return "n" if is_symbol(n) else f"{n}"


NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat)


def as_data(x: Any, device: torch.device | None = None) -> torch.Tensor:
    """Numbers, lists of them and arrays as a tensor. `torch.as_tensor` would make constants of numbers in a graph."""
    if type(x) in NUMBERS:
        return torch.full((), x, device=device)
    return torch.tensor(x, device=device) if type(x) in (list, tuple) else torch.as_tensor(x, device=device)


def refuse_to(*given: Any, **named: Any) -> None:
    """Refuse what is neither a device nor a dtype among the arguments of a `to` that failed, and CUDA where there is
    none."""
    dtype = named.get("dtype")
    if dtype is not None:
        expect("to", dtype, torch.dtype, of=" for dtype")
    for x in (*given, named.get("device")):
        if isinstance(x, str) and isinstance(getattr(torch, x, None), torch.dtype):
            raise DtypeError(message("to", "a dtype", f"{x!r}", hint=f"torch.{x}")) from None
        if x is not None and not hasattr(x, "dtype") and not isinstance(x, (bool, torch.dtype, torch.memory_format)):
            refuse_absent("to", as_device("to", x))


def expect_devices(*given: Any) -> None:
    """Leave the arguments of a `to` to torch, whose error `refuse_to` explains."""


@traced_for(expect_devices)
def expect_devices_traced(*given: Any) -> None:
    """Replace `expect_devices` in graphs, which catch no error of torch."""
    for x in given:
        if isinstance(x, str):
            as_device("to", x)


def refuse_absent(op: OpName, device: torch.device) -> None:
    """Refuse a device that the machine lacks."""
    if device.type == "cuda" and not torch.cuda.is_available():
        hint = "x.to('cuda' if torch.cuda.is_available() else 'cpu')"
        raise UnsupportedError(message(op, "a CUDA device", "a machine without", hint=hint)) from None
    if device.type not in ("cpu", "cuda"):
        as_own_device(op, device)


def as_device(op: OpName, device: Any) -> torch.device:
    """A device by its name or number; a DtypeError for another one."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        got = f"{device!r}" if isinstance(device, str) else describe(device)
        raise DtypeError(message(op, "a device", got, hint="'cpu', 'cuda' or 'cuda:0'")) from None


def as_own_device(op: OpName, device: Any) -> torch.device | None:
    """A device on which tensors can be made, None for None; an UnsupportedError for one that the machine lacks."""
    if device is None:
        return None
    found = as_device(op, device)
    if found == torch.device("cpu"):  # is everywhere, and asked for in every construction
        return found
    try:
        torch.empty(0, device=found)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        got, hint = f"device={str(found)!r}", f"leave device out; torch: {first_line(error)[:100]}"
        raise UnsupportedError(message(op, "a device that is there", got, hint=hint)) from None
    return found


@constant
def names_device(name: str) -> bool:
    """True if torch knows a device of that name."""
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True


@traced_for(as_device)
@traced_for(as_own_device)
def as_device_traced(op: OpName, device: Any) -> torch.device | None:
    """Replace `as_device` in graphs, where a device is a constant."""
    if isinstance(device, str) and not names_device(device):
        raise DtypeError(message(op, "a device", f"{device!r}", hint="'cpu', 'cuda' or 'cuda:0'"))
    return None if device is None else torch.device(device)


# Entries of an index: in a graph `is` makes constants of the numbers in a slice (Dynamo, torch 2.11-2.15).
GAP = EllipsisType  # the class of `...`
NEW_DIM = NoneType  # the class of `None`


def entries_of(index: Any) -> tuple[Any, ...]:
    """The entries of an index, of which a tuple has several."""
    entries: Any = index
    return entries if isinstance(index, tuple) else (entries,)


def positions_of(op: OpName, argnums: int | tuple[int, ...], count: int) -> tuple[int, ...]:
    """Positions of arguments, counted from the front; an IndexingError where there is none, or one is named twice."""
    given = int_tuple(op, argnums)
    found = tuple([i + count if i < 0 else i for i in given])
    if any([not 0 <= i < count for i in found]):
        got, hint = f"argnums={argnums} of {count}", "arguments by keyword are not counted"
        raise IndexingError(message(op, "argnums of positional arguments", got, hint=hint))
    if not found or len(set(found)) < len(found):
        got = f"argnums={argnums}"
        raise IndexingError(message(op, "each argument once in argnums, at least one", got, hint="argnums=(0, 1)"))
    return found


def keys_of(op: OpName, keys: Any, expected: str = "a list of keys", hint: str = LISTED) -> list[Any]:
    """Several keys as a list, from any iterable; one key alone is refused, with a KeyPathError."""
    if isinstance(keys, (str, bytes)) or not hasattr(keys, "__iter__") or hasattr(keys, "dtype"):
        got = f"{keys!r}" if isinstance(keys, str) else describe(keys)
        raise KeyPathError(message(op, expected, got, hint=hint))
    return list(keys)


def check_entries(entries: dict[str, Any]) -> None:
    """Refuse keywords that are nearly an argument, or hold a flag, a str or None: keywords are keys of data."""
    for name, value in entries.items():
        arguments = ("device",) if isinstance(value, str) else ARGUMENTS
        near = get_close_matches(name, arguments, 1, 0.8) if isinstance(value, (int, str, list, tuple)) else []
        if near or value is None or isinstance(value, (bool, str)):
            hint = f"{MEANT.get(near[0], near[0])}=..., or " if near else ""
            hint = f"{hint}TensorDict({{{name!r}: ...}}) for a key of this name"
            raise KeyPathError(message("TensorDict", "batch_size, device, or tensors by key", f"{name}=", hint=hint))


def refuse_unknown(op: OpName, given: dict[str, Any], names: Iterable[str]) -> None:
    """Refuse keywords that a function does not have, with the nearest ones that it has."""
    if given:
        found = [near for name in given for near in get_close_matches(name, [*names], 1, 0.6)]
        hint = "did you mean " + ", ".join([f"{name}=" for name in found]) if found else f"one of {', '.join(names)}"
        raise DtypeError(message(op, "known keywords", ", ".join([f"{name}=" for name in given]), hint=hint))


@traced_for(expect_number)
def expect_number_traced(op: OpName, *numbers: Any, whole: bool = False) -> None:
    """Replace `expect_number` in graphs, where a symbol is a number of its own kind."""
    for x in numbers:
        if x is None or isinstance(x, (str, tuple, list)) or (whole and isinstance(x, (bool, float))):
            hint = "int(x)" if isinstance(x, bool) else "a Python number"
            raise DtypeError(message(op, "an int" if whole else "a number", describe(x), hint=hint))


def normal_dim(dim: int, ndim: int, op: OpName) -> int:
    """A `dim` in `[-ndim, ndim)` (else a ShapeError), an int (else a DtypeError), counted from the front.

    In a graph a constant, also where it is an argument that took several values.
    """
    try:
        if -ndim <= dim < ndim and not isinstance(dim, bool):
            return tuple(range(ndim))[dim]  # an index becomes a constant, `dim % ndim` stays a symbol
    except (TypeError, ValueError, RuntimeError):
        expect_number(op, dim, whole=True)
        raise
    expect_number(op, dim, whole=True)
    if ndim == 0:
        hint = "x.unsqueeze(0) has one of size 1"
        raise ShapeError(message(op, "at least one dim", f"dim {show_size(dim)} of none", hint=hint))
    hint = "count dims of the logical shape"
    raise ShapeError(message(op, f"a dim in [{-ndim}, {ndim - 1}]", show_size(dim), hint=hint))
