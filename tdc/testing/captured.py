"""The tensors with gradients that a function of `tdc.batch` reaches without being given them, by name."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from tdc.autobatch.decorator import BatchFunction
from tdc.core import pytree

LIBRARIES = ("torch", "tdc", "numpy")


def captured(name: str, x: Any) -> dict[str, Tensor]:
    """The tensors that require gradients among what `x` holds: of a function its closure, its globals, its defaults and
    its object, of a module its parameters, and so on through the functions that are found there."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    waiting = [(name, x)]
    while waiting:
        name, x = waiting.pop(0)
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, Tensor):
            if x.requires_grad:
                found[name if name not in found else f"{name} of {len(found)}"] = x
        else:
            waiting += parts(name, x)
    return found


def parts(name: str, x: Any) -> Iterator[tuple[str, Any]]:
    """What a value holds, each part with its name."""
    if isinstance(x, nn.Module):
        yield from [(joined(name, own), p) for own, p in x.named_parameters()]
        yield from [(joined(name, own), m.forward) for own, m in x.named_modules()]
    elif isinstance(x, BatchFunction):
        yield from [(name, x.fn), ("", x.owner)]
    elif isinstance(x, MethodType):
        yield from [(name, x.__func__), ("", x.__self__)]
    elif isinstance(x, partial):
        yield from [(name, part) for part in (x.func, *x.args, *x.keywords.values())]
    elif isinstance(x, FunctionType):
        if (x.__module__ or "").partition(".")[0] not in LIBRARIES:
            yield from names_of(x)
    elif isinstance(x, (tuple, list, dict)):
        leaves = pytree.tree_flatten_with_path(x)[0]
        yield from [(f"{name}{pytree.keystr(path)}", leaf) for path, leaf in leaves]
    elif hasattr(x, "__dict__") and type(x).__module__.partition(".")[0] not in (*LIBRARIES, "builtins"):
        yield from [(joined(name, own), part) for own, part in vars(x).items()]


def joined(name: str, own: str) -> str:
    return f"{name}.{own}" if name and own else name or own


def names_of(fn: FunctionType) -> Iterator[tuple[str, Any]]:
    """The names of its closure and of its globals, and its defaults."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # not yet assigned
    yield from [(name, fn.__globals__[name]) for name in every_name(fn.__code__) if name in fn.__globals__]
    yield from [(f"a default of {fn.__name__}", x) for x in fn.__defaults__ or ()]
    yield from (fn.__kwdefaults__ or {}).items()


def every_name(code: CodeType) -> list[str]:
    """The names of globals and attributes in code, and in the code inside it."""
    inner = [name for part in code.co_consts if isinstance(part, CodeType) for name in every_name(part)]
    return [*code.co_names, *inner]
