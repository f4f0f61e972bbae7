"""The constructors of tensorclasses: code written for the fields of a class, and what stores values that need a look.

    __init__(self, images, labels, split=_MISSING, *, batch_size=(), device=None)

Invariants:
  - the code names nothing that a field may be called, builtins included: its own names begin with an underscore;
  - an instance has exactly the fields of its class, whichever constructor made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tdc.core.errors import KeyPathError, StructureError, message
from tdc.core.typing import MISSING
from tdc.tensordict.fields import Field, as_node, is_inner_value, stored_as
from tdc.tensordict.nodes import Nodes, Static
from tdc.tensordict.storage import Leaves, absorb, as_leaf, as_size, check_leaves, mark_examples

if TYPE_CHECKING:
    from tdc.tensordict.tensorclass import TensorClass


def constructor(cls: Any) -> Callable[..., None]:
    """`__init__` of the fields, in order, and `batch_size` and `device` by name.

    Written out for the fields, so that a constructor with tensors costs little more than that of a dataclass.
    """
    fields = list(cls._fields.values())
    check_order(cls.__name__, [f for f in fields if not f.kw_only])
    params = [f.name if f.required else f"{f.name}=_MISSING" for f in fields if not f.kw_only]
    named = [f.name if f.required else f"{f.name}=_MISSING" for f in fields if f.kw_only]
    self = "_self" if "self" in cls._fields else "self"  # what the code names has names that no field has
    lines = ["_size = batch_size if _type(batch_size) is _Size else _as_size(batch_size)"]
    tensors = [f.name for f in fields if f.kind == "tensor"]
    call = f"_store({self}, {{{', '.join([f'{f.name!r}: {f.name}' for f in fields])}}}, _size, device)"
    if len(tensors) == len(fields):
        are = " and ".join([f"_isinstance({n}, _Tensor)" for n in tensors])
        one = " and ".join([f"(_shape := {n}.shape) and _shape[0] == _first" for n in tensors])
        many = " and ".join([f"{n}.shape[:_n] == _size" for n in tensors])
        lines += ["_n = _len(_size)", "_first = _size[0] if _n == 1 else 0"]  # one dim is usual, and twice as quick
        lines += [f"if device is None and _type({self}) is _CLS and {are}"]
        lines[-1] += f" and (not _n or ({one} if _n == 1 else {many})):"
        lines += [f"    {self}._leaves = {{{', '.join([f'{n!r}: {n}' for n in tensors])}}}"]
        lines += [f"    {self}._nodes, {self}._size, {self}._device = _NODES, _size, None"]
        lines += [f"    {self}._field_{n} = {n}" for n in tensors]
        lines += ["else:", f"    {call}"]
    else:
        lines += [call]
    if hasattr(cls, "__post_init__"):
        lines += [f"{self}.__post_init__()"]
    scope: dict[str, Any] = {"_Size": torch.Size, "_as_size": as_size, "_store": store, "_Tensor": Tensor}
    scope |= {"_MISSING": MISSING, "_NODES": cls._typed, "_CLS": cls, "_type": type, "_len": len}
    scope |= {"_isinstance": isinstance}
    head = ", ".join([self, *params, "*", *named, "batch_size=()", "device=None"])
    exec(f"def __init__({head}):\n    " + "\n    ".join(lines), scope)
    scope["__init__"].__qualname__ = f"{cls.__qualname__}.__init__"
    return scope["__init__"]


def check_order(name: str, fields: list[Field]) -> None:
    """Positional fields without a default come before those with one, as in a dataclass."""
    late = [f.name for i, f in enumerate(fields) if f.required and not all([g.required for g in fields[:i]])]
    if late:
        got = f"{', '.join(late)} behind one with a default"
        hint = "give a default, or dataclasses.field(kw_only=True)"
        raise StructureError(message(name, "fields without a default first", got, hint=hint))


def check_names(cls: type[TensorClass], entries: Iterable[str]) -> None:
    """Check that there is a value for each field that needs one, and none for anything else."""
    wrong = [f"{k}: no field" for k in entries if k not in cls._fields]
    wrong += [f"{k}: missing" for k, f in cls._fields.items() if k not in entries and f.required]
    if wrong:
        hint = f"fields: {', '.join(cls._fields)}"
        raise KeyPathError(message(cls.__name__, "a key for each field", f"{len(wrong)} that differ", wrong, hint))


def store(self: TensorClass, given: dict[str, Any], size: torch.Size, device: Any) -> None:
    """Check and store the values of all fields, given ones or defaults.

    Raises:
        KeyPathError: a field without a default that is not given, as by the constructor of a base.
    """
    target = None if device is None else torch.device(device)
    leaves: Leaves = {}
    nodes: Nodes = dict(self._typed)
    for f in self._fields.values():
        value = given.get(f.name, MISSING)
        if value is MISSING:
            value = f.default if f.factory is MISSING else f.factory()
            if value is MISSING:
                check_names(type(self), {k: v for k, v in given.items() if v is not MISSING})
        if isinstance(value, Tensor) and target is None and f.kind in ("tensor", "any"):
            leaves[f.name] = value
        else:
            put(f, value, leaves, nodes, size, target)
    check_leaves(type(self).__name__, leaves, nodes, size)
    if size:
        mark_examples(leaves)
    self._leaves, self._nodes, self._size, self._device = leaves, nodes, size, target
    self._fill()


def put(f: Field, value: Any, leaves: Leaves, nodes: Nodes, size: Any, device: torch.device | None) -> None:
    """Put the value of a field where its kind says. Raises as `stored_as` and `as_node`."""
    path, value = f.name, as_node(f, stored_as(f, value), size)
    if type(value) is Static:
        nodes[path] = value
    elif is_inner_value(value):
        absorb(leaves, nodes, path, value, len(size), device)
    else:
        leaves[path] = as_leaf(value, path, device)
