"""How a call of a sample is made: the spelling of its arguments, and whether it runs eagerly or in a graph.

"sample"         as the sample is          torch.sum(x, 1, keepdim=True)
"by name"        all but the first named   torch.sum(x, dim=1, keepdim=True)
"all by name"    all named                 torch.sum(input=x, dim=1, keepdim=True)
"method"         the Tensor method         x.sum(1, keepdim=True)
"in place"       `inplace=True`, for functions that have it; the input must stay as it is
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MethodDescriptorType
from typing import Any

import torch
from opinfo import compare
from opinfo.mapping import Mapped, NotMapped
from torch import Tensor
from torch.utils import _pytree as pytree

SPELLINGS = ("sample", "by name", "all by name", "method", "in place")
MODES = ("eager", "aot_eager", "inductor")


def spelled(op: Any, mapped: Mapped, spelling: str) -> tuple[Callable[..., Any], Mapped]:
    """The function and the arguments of a call in a spelling.

    Raises:
        NotMapped: torch does not tell the names, or the spelling is the sample's own.
    """
    if spelling == "sample":
        return (method(op.op.__name__) if isinstance(op.op, MethodDescriptorType) else op.op), mapped
    if spelling == "method":
        if op.method_variant is None or getattr(op.method_variant, "__name__", "").startswith("__"):
            raise NotMapped("no method")
        return method(op.method_variant.__name__), mapped
    if spelling == "in place":
        if "inplace" not in mapped.names:
            raise NotMapped("no inplace=")
        if "inplace" in mapped.bound:
            raise NotMapped("no other spelling")
        return op.op, replace(mapped, kwargs={**mapped.kwargs, "inplace": True})
    if isinstance(op.op, MethodDescriptorType) or "tensors" in mapped.names:
        raise NotMapped("takes its first argument by position only")
    names, count = mapped.bound, len(mapped.args)
    first = 0 if spelling == "all by name" else 1
    if len(names) < count or count == first:
        raise NotMapped("no other spelling")
    named = dict(zip(names[first:count], mapped.args[first:], strict=True))
    return op.op, replace(mapped, args=mapped.args[:first], kwargs={**named, **mapped.kwargs})


def method(name: str) -> Callable[..., Any]:
    """A method of the first argument as a function."""

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(x, name)(*args, **kwargs)

    return run


def call(fn: Callable[..., Any], mapped: Mapped, mode: str, spelling: str = "sample") -> Any:
    """The result of a call, in a mode.

    Raises:
        AssertionError: it changed its input.
    """
    before = [x.clone() for x in tensors(mapped.args)] if spelling == "in place" else []

    def run(args: Any, kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    if mode != "eager":
        mapped = replace(
            mapped, args=tuple([list(a) if isinstance(a, tuple) and batches(a) else a for a in mapped.args])
        )
        torch.compiler.reset()
        run = torch.compile(run, backend=mode, fullgraph=True)
    got = run(mapped.args, mapped.kwargs)
    for x, y in zip(tensors(mapped.args), before, strict=bool(before)):
        assert torch.equal(x.nan_to_num(), y.nan_to_num()), "the input has changed"
    return got


def batches(x: Any) -> bool:
    """Whether a sequence holds batches, which a graph takes in lists only (torch 2.11-2.13)."""
    return any(compare.is_batch(a) for a in x)


def tensors(x: Any) -> list[Tensor]:
    """All tensors of nested arguments, those of containers among them."""
    return [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]
