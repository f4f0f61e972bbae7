"""Leaves of other libraries' classes: how a TensorDict holds what is neither a tensor nor a container of this library.

    register_leaf(KeyedJaggedTensor, shape=batch_shape, index=take, stack=stack_kjts, cat=cat_kjts)

From then on a KeyedJaggedTensor may be a value of a TensorDict. `td["sparse"]` gives the object itself, `td[2:5]`
indexes it with the function given here, `torch.stack` and `torch.cat` join it; a torch function that was not given
raises an error that says so.

Invariant: inside a TensorDict such an object lies in a `Leaf`, which has a shape and dispatches; users never see it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from tdc.core.arguments import expect
from tdc.core.container import Container
from tdc.core.errors import UnsupportedError, message, op_name
from tdc.core.typing import Op, OpName

X = TypeVar("X")
UNCHANGED = ("clone", "detach", "contiguous")
CASTS: dict[str, torch.dtype] = {
    "float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16,
    "cfloat": torch.complex64, "cdouble": torch.complex128, "chalf": torch.complex32, "long": torch.int64,
    "int": torch.int32, "short": torch.int16, "char": torch.int8, "byte": torch.uint8, "bool": torch.bool,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Protocol:
    """A registered class: its batch shape, and a function for each name of an operation."""

    shape: Callable[[Any], Sequence[int]]
    ops: dict[str, Op]


PROTOCOLS: dict[type, Protocol] = {}


def register_leaf(
    cls: type, *, shape: Callable[[Any], Sequence[int]], index: Callable[[Any, Any], Any], stack: Op | None = None,
    cat: Op | None = None, to: Op | None = None, ops: Mapping[OpName, Op] | None = None,
) -> None:  # fmt: skip
    """Let a TensorDict hold objects of `cls` as leaves.

    Args:
        shape: `x -> sizes`, those that count as batch dims.
        index: `(x, idx) -> x`, what `td[idx]` does; `idx` is any index of torch.
        stack, cat: `(list of x, dim) -> x`.
        to: `(x, *args, **kwargs) -> x`, the grammar of `Tensor.to`; without it `td.to(...)` and `td.float()`
            leave the object as it is.
        ops: functions for more operations, by torch function or method name: `{torch.reshape: fn, "float": fn}`.

    Compile:
        As the class itself: register it as a pytree to take it through vmap, grad and export.

    Example:
        >>> class Names:
        ...     def __init__(self, names):
        ...         self.names = names
        >>> register_leaf(Names, shape=lambda x: (len(x.names),), index=lambda x, i: Names(x.names[i]))
        >>> from tdc.tensordict.tensordict import TensorDict
        >>> TensorDict({"who": Names(["ada", "bob", "cyd"])}, [3])[1:]["who"].names
        ['bob', 'cyd']

    Source:
        RFC torch.dict.TensorDict, "Tensor-like interaction".
    """
    expect("interop.register_leaf", cls, type)
    given = {"getitem": index, "stack": stack, "cat": cat, "to": to}
    table: dict[str, Op] = dict.fromkeys((*UNCHANGED, "to"), unchanged)
    table |= {name: unchanged if to is None else partial(cast, to, dtype) for name, dtype in CASTS.items()}
    table |= {name: fn for name, fn in given.items() if fn is not None}
    table |= {op_name(op): fn for op, fn in (ops or {}).items()}
    PROTOCOLS[cls] = Protocol(shape, table)


def unchanged(x: X, *args: Any, **kwargs: Any) -> X:
    """The object as it is."""
    return x


def cast(to: Op, dtype: torch.dtype, x: Any, *args: Any, **kwargs: Any) -> Any:
    """The object in another dtype, by its own `to`."""
    return to(x, dtype)


class Leaf(Container):
    """A leaf that users see as another object: one of a registered class, or the tensor of a Shared."""

    __slots__ = ("_protocol", "_value")
    _kind = "leaf"
    _value: Any
    _protocol: Protocol

    def __init__(self, value: Any, protocol: Protocol) -> None:
        self._value = value
        self._protocol = protocol

    @property
    def _label(self) -> str:
        return type(self._value).__name__

    @property
    def _shown(self) -> Any:
        """The object whose shape, dtype and device a message shows."""
        return self

    @property
    def shape(self) -> torch.Size:
        """The sizes that count as batch dims."""
        return torch.Size(self._protocol.shape(self._value))

    @property
    def ndim(self) -> int:
        """Number of dims that count as batch dims."""
        return len(self.shape)

    @property
    def device(self) -> Any:
        """Attribute of the object, where it has one."""
        return getattr(self._value, "device", None)

    @property
    def dtype(self) -> Any:
        """Attribute of the object, where it has one."""
        return getattr(self._value, "dtype", None)

    def __getitem__(self, index: Any) -> Leaf:
        return wrap_leaf(self._protocol.ops["getitem"](self._value, index))

    def __reduce__(self) -> tuple[Any, ...]:
        return wrap_leaf, (self._value,)

    def __getattr__(self, name: str) -> Any:
        """Methods of tensors, which operations on a TensorDict call on its leaves, and properties of the object."""
        if name.startswith("_") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"a leaf of a TensorDict has no attribute {name!r}")
        if not callable(getattr(torch.Tensor, name)):
            return getattr(self._value, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            return self._run(name, (self, *args), kwargs)

        return method

    @classmethod
    def __torch_function__(cls, func: Op, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given: dict[str, Any] = kwargs or {}
        found = [a for a in flat((*args, *given.values())) if isinstance(a, Leaf)]
        return found[0]._run(op_name(func), args, given)

    def _run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        fn = self._protocol.ops.get(name)
        if fn is None:
            hint = f"tdc.interop.register_leaf({self._label}, ..., ops={{{name!r}: fn}}), or td.exclude(key) first"
            got = f"{name!r}, which has none"
            raise UnsupportedError(message(name, f"an operation registered for {self._label}", got, hint=hint))
        return wrap_leaf(fn(*unwrapped(args), **{k: unwrapped(v) for k, v in kwargs.items()}))


def flat(values: Sequence[Any]) -> list[Any]:
    """Arguments, lists and tuples among them replaced by their members."""
    members: list[Sequence[Any]] = [v if isinstance(v, (list, tuple)) else (v,) for v in values]
    return [x for m in members for x in m]


def unwrap(x: Any) -> Any:
    """A leaf as users see it."""
    return x._value if isinstance(x, Leaf) else x


def unwrapped(x: Any) -> Any:
    """`unwrap`, also inside lists and tuples."""
    members: Any = x
    return [unwrapped(v) for v in members] if isinstance(x, (list, tuple)) else unwrap(x)


def wrap_leaf(x: Any) -> Any:
    """A registered object, or those in a tuple or list, as leaves; anything else as it is."""
    members: Any = x
    if isinstance(x, (list, tuple)):
        return tuple([wrap_leaf(v) for v in members])
    protocol = PROTOCOLS.get(members.__class__)
    return members if protocol is None else Leaf(members, protocol)


torch.serialization.add_safe_globals([wrap_leaf])  # pyright: ignore[reportUnknownMemberType]  # torch's stub; pickles name it
