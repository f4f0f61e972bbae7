"""A block for the examples that are there: under vmap, so that it means what it means for one example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.autobatch.ragged_example import RaggedExample
from tdc.autobatch.values import Lane, flatten, is_tree, unflatten
from tdc.compile._torch.lanes import map_lanes
from tdc.ragged.storage import is_ragged


def run(fn: Callable[..., Any], args: Sequence[Any], count: int) -> Any:
    """The tuple that `fn(*args)` returns for each of `count` examples. What is the same for all stays one value."""
    leaves, spec = flatten(list(args)) if any([is_tree(x) for x in args]) else (args, None)
    return run_leaves(fn if spec is None else (lambda *own: fn(*unflatten(list(own), spec))), leaves, count)


def run_leaves(fn: Callable[..., Any], args: Sequence[Any], count: int) -> Any:
    """`run` where no argument is a tree."""
    if any([type(x) is Lane and is_ragged(x.data) for x in args]):
        return run_ragged(fn, args, count)
    lanes = [x for x in args if type(x) is Lane]
    tensors = data_of(lanes, args)
    trees: list[Any] = []

    def inner(*given: Tensor) -> Sequence[Any]:
        parts = iter(given)
        out = fn(*[next(parts) if type(x) is Lane else x for x in args])
        if not any([is_tree(x) for x in out]):
            return out
        trees.append(flatten(out)[1])
        return flatten(out)[0]

    found, mapped = map_lanes(inner, tensors, count)
    leaves = [Lane(x) if m else x for x, m in zip(found, mapped, strict=True)]
    return unflatten(leaves, trees[0]) if trees else leaves


def run_ragged(fn: Callable[..., Any], args: Sequence[Any], count: int) -> Any:
    """`run` where arguments are ragged batches: a block sees one example of each."""
    wide: list[Any] = []
    for x in args:
        whole = type(x) is Lane and is_ragged(x.data)
        wide += [x.data.values, Lane(x.data.offsets[:-1]), Lane(x.data.lengths)] if whole else [x]

    def inner(*given: Any) -> list[Any]:
        parts = iter(given)
        own = [
            RaggedExample(x, next(parts), next(parts), next(parts)) if type(x) is Lane and is_ragged(x.data)
            else next(parts) for x in args
        ]  # fmt: skip
        leaves, spec = flatten(list(fn(*own)))
        out: list[Any] = unflatten([x.lane if isinstance(x, RaggedExample) else x for x in leaves], spec)
        return out

    return run_leaves(inner, wide, count)


def data_of(lanes: Sequence[Lane], args: Sequence[Any]) -> list[Tensor]:
    """The tensors of lanes. Floats that differ between examples are as wide as the widest tensor, so that none is
    widened."""
    if not any([x.number for x in lanes]):
        return [x.data for x in lanes]
    tensors = [x.data if type(x) is Lane else x for x in args if not (type(x) is Lane and x.number)]
    wide = any([isinstance(x, Tensor) and x.dtype == torch.float64 for x in tensors])
    dtype = torch.float64 if wide else torch.get_default_dtype()
    return [x.data.to(dtype) if x.number and x.data.is_floating_point() else x.data for x in lanes]
